// A template-heavy file for the compiler; with SMALL defined, or fewer TABLES, it is a smaller one.
#ifndef TABLES
#define TABLES 12
#endif
#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <vector>
#ifndef SMALL
#include <functional>
#include <regex>
#include <set>
#include <unordered_map>
#endif

template <int N> struct Table {
    std::map<int, std::vector<std::string>> rows;
    int fill() {
        for (int i = 0; i < N; i++) rows[i % 7].push_back(std::to_string(i * N));
        for (auto &row : rows) std::sort(row.second.begin(), row.second.end());
        return static_cast<int>(rows.size()) + Table<N - 1>().fill();
    }
};
template <> struct Table<0> {
    int fill() { return 0; }
};

int main() {
    std::cout << Table<TABLES>().fill() << "\n";
#ifndef SMALL
    std::unordered_map<std::string, std::set<std::string>> words;
    std::regex word("([a-z]+)-([0-9]+)", std::regex::icase);
    std::smatch match;
    for (std::string line; std::getline(std::cin, line);)
        if (std::regex_search(line, match, word)) words[match[1]].insert(match[2]);
    std::function<bool(const std::string &)> test = [&](const std::string &s) { return words.count(s) > 0; };
    return test("abc");
#endif
}
