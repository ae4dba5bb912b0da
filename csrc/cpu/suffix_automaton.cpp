#include "cpu/suffix_automaton.h"

#include <algorithm>

namespace tlt {
namespace {

constexpr int32_t kListed = 8;  // a state of more edges finds them by hash: the empty string has thousands

// Doubling would leave half of a large automaton unused; a quarter costs 4 copies a token instead of 1.
template <typename T>
void push(std::vector<T>& v, const T& item) {
  if (v.size() == v.capacity()) v.reserve(v.size() + v.size() / 4 + 16);
  v.push_back(item);
}

}  // namespace

SuffixAutomaton::SuffixAutomaton() { add_state(0, -1, 0); }

int64_t SuffixAutomaton::bytes() const {
  return static_cast<int64_t>(sizeof(*this) + states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
                              slots_.capacity() * sizeof(Slot));
}

int32_t SuffixAutomaton::add_state(int32_t length, int32_t link, int32_t count) {
  push(states_, State{length, link, count, -1, 0});
  return static_cast<int32_t>(states_.size()) - 1;
}

size_t SuffixAutomaton::slot_of(int32_t state, uint32_t token) const {
  uint64_t h = (static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | token) * 0x9E3779B97F4A7C15ull;
  const size_t mask = slots_.size() - 1;
  size_t i = static_cast<size_t>(h >> 20) & mask;
  while (slots_[i].edge >= 0 && !(slots_[i].state == state && edges_[slots_[i].edge].token == token)) i = (i + 1) & mask;
  return i;
}

void SuffixAutomaton::index(int32_t state, int32_t edge) {
  if (2 * (indexed_ + 1) > slots_.size()) {
    std::vector<Slot> old(std::max<size_t>(2 * slots_.size(), 32), Slot{0, -1});
    old.swap(slots_);
    for (const Slot& s : old)
      if (s.edge >= 0) slots_[slot_of(s.state, edges_[s.edge].token)] = s;
  }
  slots_[slot_of(state, edges_[edge].token)] = {state, edge};
  ++indexed_;
}

int32_t SuffixAutomaton::find(int32_t state, uint32_t token) const {
  if (states_[state].degree > kListed) return slots_[slot_of(state, token)].edge;
  int32_t e = states_[state].edge;
  while (e >= 0 && edges_[e].token != token) e = edges_[e].next;
  return e;
}

int32_t SuffixAutomaton::next(int32_t state, uint32_t token) const {
  const int32_t e = find(state, token);
  return e < 0 ? -1 : edges_[e].target;
}

void SuffixAutomaton::add_edge(int32_t state, uint32_t token, int32_t target) {
  push(edges_, Edge{token, target, states_[state].edge});
  const int32_t added = static_cast<int32_t>(edges_.size()) - 1;
  states_[state].edge = added;
  const int32_t degree = ++states_[state].degree;
  if (degree == kListed + 1) {
    for (int32_t e = added; e >= 0; e = edges_[e].next) index(state, e);
  } else if (degree > kListed) {
    index(state, added);
  }
}

// The members of `state` that are suffixes of parent + token get a class of their own: the new string ends there and
// the longer members do not occur in it.
int32_t SuffixAutomaton::split(int32_t parent, int32_t state, uint32_t token) {
  const int32_t shorter = add_state(states_[parent].length + 1, states_[state].link, states_[state].count);
  for (int32_t e = states_[state].edge; e >= 0; e = edges_[e].next) add_edge(shorter, edges_[e].token, edges_[e].target);
  states_[state].link = shorter;
  for (int32_t p = parent; p >= 0; p = states_[p].link) {
    const int32_t e = find(p, token);
    if (e < 0 || edges_[e].target != state) break;
    edges_[e].target = shorter;
  }
  return shorter;
}

int32_t SuffixAutomaton::extend(int32_t last, uint32_t token) {
  if (const int32_t known = next(last, token); known >= 0)
    return states_[known].length == states_[last].length + 1 ? known : split(last, known, token);
  const int32_t fresh = add_state(states_[last].length + 1, 0, 0);
  int32_t p = last, known = -1;
  for (; p >= 0 && (known = next(p, token)) < 0; p = states_[p].link) add_edge(p, token, fresh);
  if (p >= 0)  // split may move states_: call it before the assignment takes an address
    known = states_[known].length == states_[p].length + 1 ? known : split(p, known, token);
  states_[fresh].link = p < 0 ? 0 : known;
  return fresh;
}

void SuffixAutomaton::append(Cursor& cursor, uint32_t token) {
  cursor.whole = extend(cursor.whole, token);
  // tail + token may be one longer than is counted: drop the oldest token by settling on the capped length.
  const int32_t tail = settle(cursor.tail, std::min(cursor.length, kCounted));
  ++cursor.length;
  cursor.tail = settle(next(tail, token), std::min(cursor.length, kCounted));
  for (int32_t s = cursor.tail; s > 0; s = states_[s].link) ++states_[s].count;
}

}  // namespace tlt
