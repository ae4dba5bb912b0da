#include "cpu/suffix.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "philox.h"

namespace tlt {
namespace {

// Candidates looked at for one node. Each costs a Philox call and two logarithms, some 50 ns; a short context with more
// distinct continuations than this has none worth a row.
constexpr size_t kCandidates = 48;
constexpr float kForget = 4096.0f;  // escapes: observations a cell remembers
constexpr float kPrior = 4.0f;      // observations that PPM-C's guess counts for

int32_t bucket(int32_t value, const int32_t* upper, int32_t count) {
  return static_cast<int32_t>(std::lower_bound(upper, upper + count, value) - upper);
}

constexpr int32_t kLengths[] = {1, 2, 3, 4, 6, 10, 20}, kTotals[] = {1, 2, 3, 6, 12}, kDistinct[] = {1, 2, 4};
constexpr int32_t kTypicalTotal[] = {1, 2, 3, 5, 9, 20}, kTypicalDistinct[] = {1, 2, 3, 6};

std::vector<uint32_t> sorted_ids(const int64_t* ids, int64_t count) {
  std::vector<uint32_t> out(ids, ids + count);
  std::sort(out.begin(), out.end());
  return out;
}

bool holds(const std::vector<uint32_t>& sorted, uint32_t id) {
  return std::binary_search(sorted.begin(), sorted.end(), id);
}

// Visits the contexts from the longest suffix down, with the candidates that no longer context had: `out` grows by them,
// their `chance` set to the count. visit(length, total, first new candidate) returns false to stop.
template <typename Candidates, typename Visit>
void back_off(const SuffixAutomaton& text, int32_t state, int32_t length, Candidates& out, Visit visit) {
  for (; state > 0; state = text.link(state)) {
    length = std::min(length, text.length(state));
    const size_t first = out.size();
    if (first + static_cast<size_t>(text.degree(state)) > kCandidates) return;
    int32_t total = 0;
    for (int32_t e = text.first_edge(state); e >= 0; e = text.edge(e).next) {
      const auto& edge = text.edge(e);
      const auto end = out.begin() + static_cast<std::ptrdiff_t>(first);
      if (std::any_of(out.begin(), end, [&](const auto& c) { return c.token == edge.token; })) continue;
      const int32_t count = text.occurrences(edge.target);
      out.push_back({edge.token, edge.target, length + 1, static_cast<float>(count)});
      total += count;
    }
    if (out.size() > first && !visit(length, total, first)) return;
  }
}

}  // namespace

Escapes::Escapes() {
  for (int32_t i = 0; i < kCells; ++i) {
    const float total = static_cast<float>(kTypicalTotal[i / 8 % 6]);
    const float distinct = std::min(total, static_cast<float>(kTypicalDistinct[i / 48 % 4]));
    seen_[i] = kPrior;
    escaped_[i] = kPrior * distinct / (total + distinct);
  }
}

int32_t Escapes::cell(int32_t length, int32_t total, int32_t distinct, bool failed) {
  return bucket(length, kLengths, 7) + 8 * (bucket(total, kTotals, 5) + 6 * (bucket(distinct, kDistinct, 3) + 4 * failed));
}

void Escapes::learn(int32_t cell, bool escaped) {
  if (seen_[cell] >= kForget) seen_[cell] /= 2, escaped_[cell] /= 2;
  seen_[cell] += 1;
  escaped_[cell] += escaped ? 1.0f : 0.0f;
}

int64_t SuffixPool::open(const std::string& key, const int64_t* prompt, int64_t prompt_len, const int64_t* stops,
                         int64_t num_stops, const int64_t* allowed, int64_t num_allowed) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = index_.find(key);
  if (found == index_.end()) {
    groups_.emplace_front();
    groups_.front().key = key;
    for (int64_t i = 0; i < prompt_len; ++i)
      groups_.front().text.append(groups_.front().prompt_end, static_cast<uint32_t>(prompt[i]));
    found = index_.emplace(key, groups_.begin()).first;
    used_ += size_of(groups_.front());
  }
  const GroupRef group = found->second;
  touch(group);
  ++group->live;
  samples_[next_handle_] = {group, group->prompt_end, group->resets, sorted_ids(stops, num_stops),
                            sorted_ids(allowed, num_allowed)};
  enforce_budget();
  return next_handle_++;
}

SuffixPool::Sample& SuffixPool::sample(int64_t handle) {
  const auto found = samples_.find(handle);
  if (found == samples_.end()) throw std::out_of_range("SuffixPool: no open sample of this handle");
  Sample& s = found->second;
  if (s.resets != s.group->resets) s.cursor = {}, s.resets = s.group->resets;
  return s;
}

void SuffixPool::close(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  --sample(handle).group->live;
  samples_.erase(handle);
}

// Which escapes happened before `token` was found: the levels predict() would have gone through.
void SuffixPool::learn(const SuffixAutomaton& text, const SuffixAutomaton::Cursor& cursor, uint32_t token) {
  candidates_.clear();
  bool failed = false;
  const int32_t length = std::min(cursor.length, kContext);
  back_off(text, text.settle(cursor.tail, length), length, candidates_, [&](int32_t matched, int32_t total, size_t first) {
    const auto begin = candidates_.begin() + static_cast<std::ptrdiff_t>(first);
    const bool hit = std::any_of(begin, candidates_.end(), [&](const Candidate& c) { return c.token == token; });
    escapes_.learn(Escapes::cell(matched, total, static_cast<int32_t>(candidates_.end() - begin), failed), !hit);
    failed = true;
    return !hit;
  });
}

void SuffixPool::append(const int64_t* handles, const int64_t* indptr, int64_t count, const int64_t* tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < count; ++i) {
    Sample& s = sample(handles[i]);
    used_ -= size_of(*s.group);
    for (int64_t j = indptr[i]; j < indptr[i + 1]; ++j) {
      const uint32_t token = static_cast<uint32_t>(tokens[j]);
      learn(s.group->text, s.cursor, token);
      s.group->text.append(s.cursor, token);
    }
    used_ += size_of(*s.group);
    touch(s.group);
  }
  enforce_budget();
}

int64_t SuffixPool::size_of(const Group& group) {
  return group.text.bytes() + static_cast<int64_t>(sizeof(Group) + group.key.capacity());
}

// Whole groups go, the least recently used first and those without running samples before all others. If the running
// ones alone are over the budget, the largest forget their text; their samples go on from there.
void SuffixPool::enforce_budget() {
  for (auto g = groups_.end(); used_ > budget_ && g != groups_.begin();) {
    --g;
    if (g->live > 0) continue;
    used_ -= size_of(*g);
    index_.erase(g->key);
    g = groups_.erase(g);
  }
  while (used_ > budget_ && !groups_.empty()) {
    const auto largest = std::max_element(groups_.begin(), groups_.end(),
                                          [](const Group& a, const Group& b) { return size_of(a) < size_of(b); });
    const int64_t before = size_of(*largest);
    largest->text = SuffixAutomaton();
    largest->prompt_end = {};
    ++largest->resets;
    used_ += size_of(*largest) - before;
    if (size_of(*largest) == before) return;  // nothing left to forget
  }
}

// Fills candidates_ with q of each and returns the chance that the next token is none of them. PPM with exclusion: a
// context's mass goes to what it has seen, its escape's to what only shorter contexts have.
float SuffixPool::predict(const SuffixAutomaton& text, int32_t state, int32_t length) {
  candidates_.clear();
  float rest = 1.0f;
  bool failed = false;
  back_off(text, state, length, candidates_, [&](int32_t matched, int32_t total, size_t first) {
    const int32_t distinct = static_cast<int32_t>(candidates_.size() - first);
    const float escape = escapes_.chance(Escapes::cell(matched, total, distinct, failed));
    const float unit = rest * (1.0f - escape) / static_cast<float>(total);
    for (size_t i = first; i < candidates_.size(); ++i) candidates_[i].chance *= unit;
    rest *= escape;
    failed = true;
    return true;
  });
  return rest;
}

// q becomes the share of the races that the candidate wins given its noise.
void SuffixPool::weigh(const DraftRequest& r, int32_t depth, float escape) {
  if (r.greedy) return;
  float top = tuning_.sharpness * (std::log(escape) + tuning_.unseen_noise);
  const float unseen = top;
  for (Candidate& c : candidates_) {
    const Words4 words = noise_words(static_cast<uint64_t>(r.key), static_cast<uint32_t>(r.position + depth), c.token / 4,
                                     0, static_cast<uint32_t>(r.index), static_cast<uint32_t>(r.segment));
    c.chance = tuning_.sharpness * (std::log(c.chance) + gumbel_from_word(words.x[c.token % 4]));
    top = std::max(top, c.chance);
  }
  float sum = std::exp(unseen - top);
  for (Candidate& c : candidates_) sum += c.chance = std::exp(c.chance - top);
  for (Candidate& c : candidates_) c.chance /= sum;
}

// Push the children of `node`, which stands at `index` in the tree.
void SuffixPool::expand(const DraftRequest& r, const Sample& from, const Node& node, int32_t index, double min_chance) {
  const float escape = predict(from.group->text, node.state, node.length);
  const bool barred = node.depth < r.barred;
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(),
                                   [&](const Candidate& c) {
                                     return (barred && holds(from.stops, c.token)) ||
                                            (!from.allowed.empty() && !holds(from.allowed, c.token));
                                   }),
                    candidates_.end());
  weigh(r, node.depth, escape);
  const size_t kept = std::min(candidates_.size(), static_cast<size_t>(r.top_k));
  std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(kept), candidates_.end(),
                    [](const Candidate& a, const Candidate& b) {
                      return a.chance != b.chance ? a.chance > b.chance : a.token < b.token;
                    });
  for (size_t i = 0; i < kept && node.chance * candidates_[i].chance >= min_chance; ++i) {
    const Candidate& c = candidates_[i];
    heap_.push_back({node.chance * c.chance, index, node.depth + 1, c.token, c.state, c.length});
    std::push_heap(heap_.begin(), heap_.end());
  }
}

void SuffixPool::propose(const DraftRequest* requests, int64_t count, double min_chance, int64_t* indptr, int64_t* tokens,
                         int64_t* parents, double* chances) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    const DraftRequest& r = requests[i];
    const Sample& s = sample(r.sample);
    const SuffixAutomaton& text = s.group->text;
    indptr[i] = at;
    tokens[at] = parents[at] = -1, chances[at] = 1.0;
    int32_t nodes = 1;
    heap_.clear();
    const int32_t length = std::min(s.cursor.length, kContext);
    if (r.max_depth > 0 && r.max_nodes > 1)
      expand(r, s, {1.0, -1, 0, 0, text.settle(s.cursor.tail, length), length}, 0, min_chance);
    for (; nodes < r.max_nodes && !heap_.empty(); ++nodes) {
      std::pop_heap(heap_.begin(), heap_.end());
      const Node node = heap_.back();
      heap_.pop_back();
      tokens[at + nodes] = node.token, parents[at + nodes] = node.parent, chances[at + nodes] = node.chance;
      if (node.depth < r.max_depth && !holds(s.stops, node.token)) {
        const int32_t matched = std::min(node.length, kContext);
        expand(r, s, {node.chance, node.parent, node.depth, node.token, text.settle(node.state, matched), matched}, nodes,
               min_chance);
      }
    }
    at += nodes;
  }
  indptr[count] = at;
}

int64_t SuffixPool::occurrences(const std::string& key, const int64_t* tokens, int64_t count) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = index_.find(key);
  if (found == index_.end()) return -1;
  const SuffixAutomaton& text = found->second->text;
  int32_t state = 0;
  for (int64_t i = 0; i < count && state >= 0; ++i) state = text.next(state, static_cast<uint32_t>(tokens[i]));
  return state < 0 ? 0 : text.occurrences(state);
}

}  // namespace tlt
