//! The swap bandwidth workload: an area is written, paged out and read again in each round, to
//! measure swap-out and swap-in.

use super::{MIB, Round, Rounds};
use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::Access;
use crate::scenario::Within;
use crate::schedule::Took;
use foliomem_types::units::{CpuNumber, MAX_ORDER, PageNumber};
use serde::Deserialize;

/// The swap bandwidth workload and its parameters.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapBandwidth {
    area_mib: Within<1, 65536>,
    rounds: Within<1, 100_000>,
    /// Whether every page repeats one word.
    pub(super) filled: bool,
}

impl SwapBandwidth {
    /// Returns the pages of address space.
    pub fn pages(&self) -> u32 {
        MAX_ORDER.pages() + self.area_mib.get() * MIB
    }

    /// Runs the workload on one CPU.
    pub fn run(&self, lab: &mut Lab) -> Result<(Vec<Round>, Took), LabError> {
        let start = PageNumber(MAX_ORDER.pages().into());
        let area = start..start.offset(self.area_mib.get() * MIB);
        let (mut rounds, mut took, mut now_ns) = (Rounds::new(lab), Took::default(), 0);
        lab.map(area.clone());
        for _ in 0..self.rounds.get() {
            let mut timed = |lab: &mut Lab, act: &mut dyn FnMut(&mut Lab) -> Result<(), LabError>| {
                let began_ns = now_ns;
                lab.begin(CpuNumber(0), now_ns);
                act(lab)?;
                now_ns = took.add(now_ns, lab.end(now_ns));
                Ok::<u64, LabError>(now_ns - began_ns)
            };
            timed(lab, &mut |lab| lab.touch_all(area.clone(), Access::Write))?;
            let out_ns = timed(lab, &mut |lab| {
                lab.page_out(area.clone());
                Ok(())
            })?;
            lab.note_swapped();
            let in_ns = timed(lab, &mut |lab| lab.touch_all(area.clone(), Access::Read))?;
            took.page_out_ns += out_ns;
            took.page_in_ns += in_ns;
            rounds.end(lab);
        }
        Ok((rounds.rounds, took))
    }
}
