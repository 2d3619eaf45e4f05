//! Plots as SVG: lines against numbers, areas and lines against time, bars against names.

use crate::markup::Markup;
use std::fmt::Display;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 42.0;
/// Minimum distance of the numbers below an axis.
const LABEL_WIDTH: f64 = 44.0;
/// Minimum ratio of the largest to the smallest value for a logarithmic axis: a linear one would
/// put all but the largest into one place.
const WIDE_RATIO: f64 = 32.0;
/// Maximum number of values on a logarithmic axis.
const FEW: usize = 12;

/// The style of plots. A small screen gets larger letters. Nothing in it needs escaping.
pub const STYLE: &str = "
figure { margin: 0; flex: 0 1 640px; min-width: 280px; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: currentColor; }
svg .grid { stroke: #8884; }
svg .line { fill: none; stroke-width: 2; }
.legend { list-style: none; padding: 0; margin: 0; font-size: 13px; }
.legend li { display: inline-block; margin-right: 1.2em; }
.legend span { display: inline-block; width: 22px; margin-right: 0.4em; vertical-align: middle; }
@media screen and (max-width: 600px) { svg text { font-size: 18px; } }
";

/// Colours that colour-blind people can distinguish (Okabe and Ito, without yellow and black).
const COLOURS: [&str; 6] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
/// Dash patterns that distinguish lines of one colour.
const DASHES: [&str; 2] = ["none", "6 3"];
/// Maximum number of series in a plot.
pub const MAX_SERIES: usize = COLOURS.len() * DASHES.len();

/// The horizontal axis.
pub enum Axis {
    /// Positions by numbers, in any order.
    Numbers(Vec<f64>),
    /// Positions side by side.
    Names(Vec<String>),
    /// Times since the start, in order.
    Time {
        /// The times, in seconds.
        seconds: Vec<f64>,
        /// Number of the first series that are drawn as areas, one above the other.
        stacked: usize,
    },
}

/// A series of values, one for each position of the axis if there is one.
pub struct Series {
    /// The name of the series.
    pub name: String,
    /// The values by position.
    pub values: Vec<Option<f64>>,
}

/// A plot.
pub struct Plot {
    /// The title: the name of the values.
    pub title: String,
    /// The name of the axis; of an axis of time the name without the unit.
    pub axis_name: String,
    /// The horizontal axis.
    pub axis: Axis,
    /// The series, at most [`MAX_SERIES`].
    pub series: Vec<Series>,
}

/// Returns at most six steps of 1, 2 or 5 times a power of ten, from 0 up to `most` or slightly
/// more.
fn ticks(most: f64) -> Vec<f64> {
    let most = if most > 0.0 && most.is_finite() { most } else { 1.0 };
    let decade = 10f64.powf((most / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * decade).into_iter().find(|step| step * 5.0 >= most * 0.999);
    let step = step.unwrap_or(decade * 10.0);
    let last = (most / step).ceil() as u32;
    (0..=last).map(|number| f64::from(number) * step).collect()
}

/// Formats a number short, for an axis.
fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        large if large >= 1e9 => (value / 1e9, "G"),
        large if large >= 1e6 => (value / 1e6, "M"),
        large if large >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    // Three digits: rounding errors of additions must not show.
    let digits = if value == 0.0 { 0 } else { (2 - value.abs().log10().floor() as i32).max(0) };
    let text = format!("{value:.*}", digits as usize);
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

struct Scale {
    from: f64,
    to: f64,
    is_log: bool,
}

impl Scale {
    fn new(numbers: &[f64]) -> Scale {
        let from = numbers.iter().copied().fold(f64::INFINITY, f64::min);
        let to = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Scale { from, to, is_log: from > 0.0 && to / from >= WIDE_RATIO && numbers.len() <= FEW }
    }

    fn x(&self, number: f64) -> f64 {
        let at = |number: f64| if self.is_log { number.ln() } else { number };
        let width = at(self.to) - at(self.from);
        let part = if width > 0.0 { (at(number) - at(self.from)) / width } else { 0.5 };
        LEFT + 8.0 + part * (WIDTH - LEFT - RIGHT - 16.0)
    }
}

fn y(value: f64, most: f64) -> f64 {
    TOP + (1.0 - value / most) * (HEIGHT - TOP - BOTTOM)
}

impl Plot {
    /// Adds the plot to a page.
    pub fn draw(&self, page: &mut Markup) {
        let stacks = self.stacks().into_iter().flatten();
        let highest = self.series.iter().flat_map(|series| &series.values).flatten().copied().chain(stacks);
        let highest = highest.fold(0.0, f64::max);
        let ticks = ticks(highest);
        let most = ticks.last().copied().unwrap_or(1.0);
        page.element("figure", &[], |figure| {
            figure.leaf("figcaption", &self.title);
            let view = format!("0 0 {WIDTH} {HEIGHT}");
            figure.element("svg", &[("viewBox", &view), ("role", &"img"), ("aria-label", &self.title)], |svg| {
                for &tick in &ticks {
                    let at = y(tick, most);
                    line(svg, "grid", (LEFT, at), (WIDTH - RIGHT, at));
                    label(svg, "end", (LEFT - 6.0, at + 4.0), &short(tick));
                }
                let name = match &self.axis {
                    Axis::Numbers(numbers) => {
                        self.draw_lines(svg, numbers, most);
                        self.axis_name.clone()
                    }
                    Axis::Names(names) => {
                        self.draw_bars(svg, names, most);
                        self.axis_name.clone()
                    }
                    Axis::Time { seconds, .. } => {
                        let unit = self.draw_times(svg, seconds, most);
                        format!("{}, {unit}", self.axis_name)
                    }
                };
                label(svg, "middle", ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 5.0), &name);
            });
            self.draw_legend(figure);
        });
    }

    fn draw_lines(&self, svg: &mut Markup, numbers: &[f64], most: f64) {
        let scale = Scale::new(numbers);
        let mut order: Vec<usize> = (0..numbers.len()).collect();
        order.sort_by(|&a, &b| numbers[a].total_cmp(&numbers[b]));
        let mut free_from = f64::NEG_INFINITY;
        for &place in &order {
            let x = scale.x(numbers[place]);
            if x >= free_from {
                label(svg, "middle", (x, HEIGHT - BOTTOM + 16.0), &short(numbers[place]));
                free_from = x + LABEL_WIDTH;
            }
        }
        for (number, series) in self.series.iter().enumerate() {
            let points: Vec<(f64, f64, f64)> = order
                .iter()
                .filter_map(|&place| {
                    let value = series.values[place]?;
                    Some((numbers[place], scale.x(numbers[place]), value))
                })
                .collect();
            let path: Vec<String> =
                points.iter().map(|(_, x, value)| format!("{x:.1},{:.1}", y(*value, most))).collect();
            let (colour, _) = look(number);
            draw_polyline(svg, number, &path);
            for (at, x, value) in points {
                let (x, y) = (format!("{x:.1}"), format!("{:.1}", y(value, most)));
                svg.element("circle", &[("cx", &x), ("cy", &y), ("r", &2.5), ("fill", &colour)], |circle| {
                    circle.leaf("title", format_args!("{}, {}: {}", series.name, short(at), exact(value)));
                });
            }
        }
    }

    /// Returns the upper edges of the areas, from the lowest.
    fn stacks(&self) -> Vec<Vec<f64>> {
        let Axis::Time { seconds, stacked } = &self.axis else { return Vec::new() };
        let mut edge = vec![0.0; seconds.len()];
        let areas = self.series.iter().take(*stacked).map(|series| {
            edge.iter_mut().zip(&series.values).for_each(|(edge, value)| *edge += value.unwrap_or(0.0));
            edge.clone()
        });
        areas.collect()
    }

    /// Draws areas and lines against time. Returns the unit of the axis.
    fn draw_times(&self, svg: &mut Markup, seconds: &[f64], most: f64) -> &'static str {
        let last = seconds.last().copied().unwrap_or(0.0);
        let (unit_seconds, unit) = time_unit(last);
        let x = |at: f64| LEFT + if last > 0.0 { at / last } else { 0.0 } * (WIDTH - LEFT - RIGHT);
        for tick in ticks(last / unit_seconds).into_iter().filter(|tick| tick * unit_seconds <= last) {
            label(svg, "middle", (x(tick * unit_seconds), HEIGHT - BOTTOM + 16.0), &short(tick));
        }
        let point = |(at, value): (f64, f64)| format!("{:.1},{:.1}", x(at), y(value, most));
        let path = |edge: &[f64]| seconds.iter().copied().zip(edge.iter().copied()).map(point).collect::<Vec<_>>();
        let stacks = self.stacks();
        let mut below = vec![0.0; seconds.len()];
        for (number, edge) in stacks.iter().enumerate() {
            let mut points = path(edge);
            points.extend(path(&below).into_iter().rev());
            let attributes: [(&str, &dyn Display); 3] =
                [("fill", &look(number).0), ("fill-opacity", &0.6), ("points", &points.join(" "))];
            svg.element("polygon", &attributes, |_| {});
            below.clone_from(edge);
        }
        for (number, series) in self.series.iter().enumerate().skip(stacks.len()) {
            let points = seconds.iter().zip(&series.values).filter_map(|(&at, &value)| Some(point((at, value?))));
            draw_polyline(svg, number, &points.collect::<Vec<_>>());
        }
        unit
    }

    fn draw_bars(&self, svg: &mut Markup, names: &[String], most: f64) {
        let group = (WIDTH - LEFT - RIGHT) / names.len().max(1) as f64;
        let width = group * 0.8 / self.series.len().max(1) as f64;
        for (place, name) in names.iter().enumerate() {
            let start = LEFT + group * place as f64;
            label(svg, "middle", (start + group / 2.0, HEIGHT - BOTTOM + 16.0), name);
            for (number, series) in self.series.iter().enumerate() {
                let Some(value) = series.values[place] else { continue };
                let (colour, dashes) = look(number);
                let opacity = if dashes == DASHES[0] { 1.0 } else { 0.5 };
                let top = y(value, most);
                let (x, width) =
                    (start + group * 0.1 + width * number as f64, format!("{:.2}", (width - 1.0).max(0.5)));
                let (x, y, height) = (format!("{x:.2}"), format!("{top:.1}"), format!("{:.1}", HEIGHT - BOTTOM - top));
                let attributes: [(&str, &dyn Display); 6] = [
                    ("x", &x),
                    ("y", &y),
                    ("width", &width),
                    ("height", &height),
                    ("fill", &colour),
                    ("fill-opacity", &opacity),
                ];
                svg.element("rect", &attributes, |rect| {
                    rect.leaf("title", format_args!("{}, {name}: {}", series.name, exact(value)));
                });
            }
        }
    }

    fn draw_legend(&self, figure: &mut Markup) {
        if self.series.len() < 2 {
            return;
        }
        figure.element("ul", &[("class", &"legend")], |list| {
            for (number, series) in self.series.iter().enumerate() {
                let (colour, dashes) = look(number);
                let border = if dashes == DASHES[0] { "solid" } else { "dashed" };
                list.element("li", &[], |item| {
                    let is_area = matches!(self.axis, Axis::Time { stacked, .. } if number < stacked);
                    let px = if is_area { 10 } else { 3 };
                    let style = format!("border-top: {px}px {border} {colour}");
                    item.element("span", &[("style", &style)], |_| {});
                    item.text(&series.name);
                });
            }
        });
    }
}

fn draw_polyline(svg: &mut Markup, number: usize, points: &[String]) {
    let (colour, dashes) = look(number);
    let attributes: [(&str, &dyn Display); 4] =
        [("class", &"line"), ("stroke", &colour), ("stroke-dasharray", &dashes), ("points", &points.join(" "))];
    svg.element("polyline", &attributes, |_| {});
}

/// Returns the unit for an axis of `seconds` seconds, and its name.
fn time_unit(seconds: f64) -> (f64, &'static str) {
    match seconds {
        short if short < 300.0 => (1.0, "s"),
        minutes if minutes < 5.0 * 3600.0 => (60.0, "min"),
        _ => (3600.0, "h"),
    }
}

/// Returns the colour and the dashes of a series.
fn look(number: usize) -> (&'static str, &'static str) {
    (COLOURS[number % COLOURS.len()], DASHES[number / COLOURS.len() % DASHES.len()])
}

/// Formats a number for the tip of a point.
fn exact(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value}") } else { format!("{value:.3}") }
}

fn line(svg: &mut Markup, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(|at| format!("{at:.1}"));
    svg.element("line", &[("class", &class), ("x1", &x1), ("y1", &y1), ("x2", &x2), ("y2", &y2)], |_| {});
}

fn label(svg: &mut Markup, anchor: &str, (x, y): (f64, f64), text: &str) {
    let [x, y] = [x, y].map(|at| format!("{at:.1}"));
    svg.element("text", &[("x", &x), ("y", &y), ("text-anchor", &anchor)], |label| label.text(text));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn axis_numbers_are_short() {
        let cases = [
            (0.0, "0"),
            (0.3 - 0.1, "0.2"),
            (12.0, "12"),
            (100.0, "100"),
            (9999.0, "9999"),
            (20_000.0, "20k"),
            (2.5e6, "2.5M"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn areas_are_stacked_below_lines_against_time() {
        let series = |name: &str, values: [f64; 2]| Series { name: name.to_owned(), values: values.map(Some).to_vec() };
        let plot = Plot {
            title: "memory".to_owned(),
            axis_name: "time".to_owned(),
            axis: Axis::Time { seconds: vec![0.0, 7200.0], stacked: 2 },
            series: vec![series("a", [1.0, 2.0]), series("b", [1.0, 3.0]), series("limit", [4.0, 4.0])],
        };
        let mut page = Markup::default();
        plot.draw(&mut page);
        let page = page.into_page();
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..roxmltree::ParsingOptions::default() };
        let document = roxmltree::Document::parse_with_options(&page, options).unwrap();
        let points = |tag: &str| -> Vec<Vec<(f64, f64)>> {
            let marks = document.descendants().filter(|node| node.has_tag_name(tag));
            let pair =
                |text: &str| text.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).unwrap();
            marks.map(|node| node.attribute("points").unwrap().split(' ').map(pair).collect()).collect()
        };
        let close = |one: f64, other: f64| assert!((one - other).abs() < 0.11, "{one} {other}");
        let ([low, high], [line]) = (&points("polygon")[..], &points("polyline")[..]) else { panic!("{page}") };
        assert_eq!((low.len(), high.len(), line.len()), (4, 4, 2));
        close(low[1].1, y(2.0, 5.0));
        close(high[1].1, y(5.0, 5.0));
        close(high[2].1, low[1].1);
        close(line[1].0, WIDTH - RIGHT);
        assert!(page.contains("time, min"), "{page}");
    }

    proptest! {
        #[test]
        fn ticks_are_few_and_cover_every_value(most in prop_oneof![0.0..1e-3, 0.0..1e3, 0.0..1e15]) {
            let ticks = ticks(most);
            prop_assert!((2..=7).contains(&ticks.len()), "{ticks:?}");
            prop_assert!(*ticks.last().unwrap() >= most * (1.0 - 1e-12));
        }

        #[test]
        fn all_marks_lie_inside_the_plot(
            points in prop::collection::vec((0.001..1e7f64, prop::option::of(0.0..1e9f64)), 1..20), is_named: bool
        ) {
            let (numbers, values): (Vec<f64>, Vec<Option<f64>>) = points.into_iter().unzip();
            let shown = values.iter().flatten().count();
            let names = numbers.iter().map(ToString::to_string).collect();
            let axis = if is_named { Axis::Names(names) } else { Axis::Numbers(numbers) };
            let plot = Plot { title: String::new(), axis_name: String::new(), axis, series: vec![Series { name: String::new(), values }] };
            let mut page = Markup::default();
            plot.draw(&mut page);
            let page = page.into_page();
            let options = roxmltree::ParsingOptions { allow_dtd: true, ..roxmltree::ParsingOptions::default() };
            let document = roxmltree::Document::parse_with_options(&page, options).unwrap();
            let marks: Vec<_> = document.descendants().filter(|node| ["circle", "rect"].contains(&node.tag_name().name())).collect();
            prop_assert_eq!(marks.len(), shown);
            for mark in marks {
                let number = |name: &str| mark.attribute(name).map_or(0.0, |text| text.parse::<f64>().unwrap());
                let (x, y) = (number("cx") + number("x"), number("cy") + number("y"));
                prop_assert!(x >= LEFT && x + number("width") <= WIDTH && y >= TOP - 0.1, "{mark:?}");
                prop_assert!(y + number("height") <= HEIGHT - BOTTOM + 0.2, "{mark:?}");
            }
        }
    }
}
