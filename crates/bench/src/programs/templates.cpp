// The head of the generated C++ program: each instance of work<N> is new types all through the library.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>
template <int N> struct Key { long a; std::string b; bool operator<(const Key &o) const { return std::tie(a, b) < std::tie(o.a, o.b); } };
template <int N> using Cell = std::variant<long, double, std::string, std::vector<Key<N>>, std::shared_ptr<Key<N>>>;
template <int N> struct Show { std::string operator()(long v) const { return std::to_string(v + N); } std::string operator()(double v) const { return std::to_string(v * N); } std::string operator()(const std::string &v) const { return v; } std::string operator()(const std::vector<Key<N>> &v) const { std::ostringstream s; for (auto &k : v) s << k.a << k.b; return s.str(); } std::string operator()(const std::shared_ptr<Key<N>> &v) const { return v ? v->b : ""; } };
template <int N> std::string work(long seed) {
  std::map<Key<N>, Cell<N>> table; std::unordered_map<long, std::set<Key<N>>> index; std::vector<std::tuple<Key<N>, Cell<N>>> rows;
  for (long i = 0; i < seed; ++i) { Key<N> k{i * N, std::to_string(i)}; table[k] = Cell<N>(i % 2 ? Cell<N>(double(i)) : Cell<N>(std::vector<Key<N>>{k, k})); index[i % 7].insert(k); rows.emplace_back(k, table[k]); }
  std::sort(rows.begin(), rows.end(), [](auto &x, auto &y) { return std::get<0>(y) < std::get<0>(x); });
  std::stable_sort(rows.begin(), rows.end(), [](auto &x, auto &y) { return std::get<0>(x).b < std::get<0>(y).b; });
  std::function<std::string(const Cell<N> &)> show = [](const Cell<N> &c) { return std::visit(Show<N>{}, c); };
  std::string out; for (auto &[k, c] : rows) out += show(c); for (auto &[n, s] : index) for (auto &k : s) out += k.b; return out;
}
