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
constexpr float kForget = 4096.0f;  // observations that a learned estimate remembers
constexpr float kPrior = 4.0f;      // observations that PPM-C's guess counts for
constexpr float kTrust = 50.0f;     // forecasts: drafts that the raw estimate counts for
constexpr size_t kLevels = 12;      // contexts mixed
constexpr float kGrowth = 1.3f;     // a shorter context of a source must have been seen this much more often than the last
constexpr float kUnseen = 2e-5f;    // EM: probability of a token that no context has seen
constexpr int64_t kSeam = 4;        // tokens of the prompt that the common text takes, as the context of an output's start

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

}  // namespace

Escapes::Escapes() {
  for (int32_t i = 0; i < kCells; ++i) {
    const float total = static_cast<float>(kTypicalTotal[i / 8 % 6]);
    const float distinct = std::min(total, static_cast<float>(kTypicalDistinct[i / 48 % 4]));
    seen_[i] = kPrior;
    escaped_[i] = kPrior * distinct / (total + distinct);
  }
}

int32_t Escapes::cell(int32_t length, int32_t total, int32_t distinct, int32_t source) {
  const int32_t shape = bucket(length, kLengths, 7) + 8 * (bucket(total, kTotals, 5) + 6 * bucket(distinct, kDistinct, 3));
  return shape + 8 * 6 * 4 * source;
}

void Escapes::learn(int32_t cell, float weight, float escaped) {
  if (seen_[cell] >= kForget) seen_[cell] /= 2, escaped_[cell] /= 2;
  seen_[cell] += weight;
  escaped_[cell] += escaped;
}

Forecasts::Forecasts() {
  for (int32_t i = 0; i < 2 * kBins; ++i) {
    const float root = (static_cast<float>(i % kBins) + 0.5f) / kBins;
    right_[i] = expected_[i] = kTrust * root * root;
  }
}

// Bins are narrower where estimates are small, since most are.
int32_t Forecasts::bin(float raw, bool greedy) {
  return std::min(static_cast<int32_t>(std::sqrt(raw) * kBins), kBins - 1) + kBins * greedy;
}

float Forecasts::chance(float raw, bool greedy) const {
  const int32_t i = bin(raw, greedy);
  return std::min(raw * right_[i] / expected_[i], 1.0f);
}

void Forecasts::learn(float raw, bool greedy, bool right) {
  const int32_t i = bin(raw, greedy);
  if (expected_[i] >= kForget) expected_[i] /= 2, right_[i] /= 2;
  expected_[i] += raw;
  right_[i] += right ? 1.0f : 0.0f;
}

SuffixPool::SuffixPool(int64_t byte_budget, Tuning tuning, bool across_prompts)
    : budget_(byte_budget), across_prompts_(across_prompts), tuning_(tuning) {
  used_ = common_.automaton.bytes();
}

void SuffixPool::add(Text& text, Place& place, const int64_t* tokens, int64_t count) {
  used_ -= text.automaton.bytes();
  for (int64_t i = 0; i < count; ++i) text.automaton.append(place.cursor, static_cast<uint32_t>(tokens[i]));
  used_ += text.automaton.bytes();
}

int64_t SuffixPool::open(const std::string& key, const int64_t* prompt, int64_t prompt_len, const int64_t* stops,
                         int64_t num_stops, const int64_t* allowed, int64_t num_allowed) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = index_.find(key);
  if (found == index_.end()) {
    groups_.emplace_front();
    groups_.front().key = key;
    used_ += size_of(groups_.front());
    add(groups_.front().text, groups_.front().prompt_end, prompt, prompt_len);
    found = index_.emplace(key, groups_.begin()).first;
  }
  const GroupRef group = found->second;
  touch(group);
  ++group->live;
  Sample s{group, {group->prompt_end, {{}, common_.resets}}, sorted_ids(stops, num_stops),
           sorted_ids(allowed, num_allowed), {}, false};
  const int64_t seam = std::min(prompt_len, kSeam);
  if (across_prompts_) add(common_, s.places[kCommon], prompt + prompt_len - seam, seam);
  samples_.emplace(next_handle_, std::move(s));
  enforce_budget();
  return next_handle_++;
}

SuffixPool::Sample& SuffixPool::sample(int64_t handle) {
  const auto found = samples_.find(handle);
  if (found == samples_.end()) throw std::out_of_range("SuffixPool: no open sample of this handle");
  Sample& s = found->second;
  const std::array<int64_t, kSources> resets = {s.group->text.resets, common_.resets};
  for (int32_t i = 0; i < kSources; ++i)
    if (s.places[i].resets != resets[i]) s.places[i] = {{}, resets[i]};
  return s;
}

void SuffixPool::close(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  --sample(handle).group->live;
  samples_.erase(handle);
}

SuffixPool::Matches SuffixPool::matches(const Sample& sample) const {
  const Texts all = texts(sample);
  Matches out;
  for (int32_t i = 0; i < kSources; ++i) {
    const SuffixAutomaton::Cursor& cursor = sample.places[i].cursor;
    out[i].length = std::min(cursor.length, kContext);
    out[i].state = all[i]->settle(cursor.tail, out[i].length);
  }
  return out;
}

void SuffixPool::add_level(const SuffixAutomaton& text, int32_t state, int32_t length, int32_t source) {
  const size_t first = hits_.size();
  int32_t total = 0;
  for (int32_t e = text.first_edge(state); e >= 0; e = text.edge(e).next) {
    const uint32_t token = text.edge(e).token;
    const int32_t count = text.occurrences(text.edge(e).target);
    const auto known = std::find_if(candidates_.begin(), candidates_.end(), [&](const Candidate& c) { return c.token == token; });
    hits_.push_back({static_cast<size_t>(known - candidates_.begin()), static_cast<float>(count)});
    if (known == candidates_.end()) candidates_.push_back({token, 0.0f});
    total += count;
  }
  levels_.push_back({Escapes::cell(length, total, text.degree(state), source), static_cast<float>(total), first});
}

// The contexts of all sources from the longest down, with what has followed each.
void SuffixPool::collect(const Texts& texts, Matches at) {
  candidates_.clear(), levels_.clear(), hits_.clear();
  std::array<int32_t, kSources> seen = {0, 0};
  while (levels_.size() < kLevels) {
    const int32_t source = at[kCommon].length > at[kOwn].length ? kCommon : kOwn;
    const SuffixAutomaton& text = *texts[source];
    const int32_t state = at[source].state, length = std::min(at[source].length, text.length(state));
    if (state <= 0) return;  // the longest context left is the empty one
    at[source].state = text.link(state);
    at[source].length = std::min(length, text.length(at[source].state));
    if (text.degree(state) == 0 || text.occurrences(state) < kGrowth * static_cast<float>(seen[source])) continue;
    if (candidates_.size() + static_cast<size_t>(text.degree(state)) > kCandidates) return;
    seen[source] = text.occurrences(state);
    add_level(text, state, length, source);
  }
}

// EM: how much of `token`'s mass came from each context's own counts, and how much from below it.
void SuffixPool::learn(const Sample& sample, uint32_t token) {
  collect(texts(sample), matches(sample));
  std::array<float, kLevels + 1> below;
  below[levels_.size()] = kUnseen;
  for (size_t i = levels_.size(); i-- > 0;) {
    const Level& level = levels_[i];
    const size_t end = i + 1 < levels_.size() ? levels_[i + 1].first : hits_.size();
    float count = 0;
    for (size_t h = level.first; h < end; ++h)
      if (candidates_[hits_[h].candidate].token == token) count = hits_[h].count;
    const float escape = escapes_.share(level.cell);
    below[i] = (1 - escape) * count / level.total + escape * below[i + 1];
  }
  float weight = 1;
  for (size_t i = 0; i < levels_.size() && weight > 1e-3f; ++i) {
    const float escaped = weight * escapes_.share(levels_[i].cell) * below[i + 1] / below[i];
    escapes_.learn(levels_[i].cell, weight, escaped);
    weight = escaped;
  }
}

void SuffixPool::check_forecast(Sample& sample, uint32_t token) {
  for (const Candidate& c : sample.pending) forecasts_.learn(c.chance, sample.pending_greedy, c.token == token);
  sample.pending.clear();
}

void SuffixPool::append(const int64_t* handles, const int64_t* indptr, int64_t count, const int64_t* tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < count; ++i) {
    Sample& s = sample(handles[i]);
    if (indptr[i] < indptr[i + 1]) check_forecast(s, static_cast<uint32_t>(tokens[indptr[i]]));
    for (int64_t j = indptr[i]; j < indptr[i + 1]; ++j) {
      learn(s, static_cast<uint32_t>(tokens[j]));
      add(s.group->text, s.places[kOwn], tokens + j, 1);
      if (across_prompts_) add(common_, s.places[kCommon], tokens + j, 1);
    }
    touch(s.group);
  }
  enforce_budget();
}

int64_t SuffixPool::size_of(const Group& group) {
  return group.text.automaton.bytes() + static_cast<int64_t>(sizeof(Group) + group.key.capacity());
}

void SuffixPool::forget(Text& text) {
  text.automaton = SuffixAutomaton();
  ++text.resets;
}

// Whole groups go, the least recently used first and those without running samples before all others. If the running
// ones alone are over the budget, the largest forget their text; their samples go on from there.
void SuffixPool::enforce_budget() {
  if (const int64_t size = common_.automaton.bytes(); size > budget_ / 2) {
    forget(common_);
    used_ += common_.automaton.bytes() - size;
  }
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
    forget(largest->text);
    largest->prompt_end = {{}, largest->text.resets};
    used_ += size_of(*largest) - before;
    if (size_of(*largest) == before) return;  // nothing left to forget
  }
}

// Fills candidates_ with q of each and returns the chance that the next token is none of them.
float SuffixPool::predict(const Texts& texts, const Matches& at) {
  collect(texts, at);
  float rest = 1.0f;
  for (size_t i = levels_.size(), end = hits_.size(); i-- > 0;) {
    const Level& level = levels_[i];
    const float escape = escapes_.share(level.cell);
    rest *= escape;
    for (Candidate& c : candidates_) c.chance *= escape;
    for (size_t h = level.first; h < end; ++h)
      candidates_[hits_[h].candidate].chance += (1 - escape) * hits_[h].count / level.total;
    end = level.first;
  }
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
void SuffixPool::expand(const DraftRequest& r, Sample& from, const Node& node, int32_t index, double min_chance) {
  const float escape = predict(texts(from), node.matches);
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
  const bool greedy = r.greedy != 0;
  if (index == 0) {
    from.pending.assign(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(kept));
    from.pending_greedy = greedy;
  }
  for (size_t i = 0; i < kept; ++i) {
    const Candidate& c = candidates_[i];
    const double chance = node.chance * forecasts_.chance(c.chance, greedy);
    if (chance < min_chance) continue;
    heap_.push_back({chance, index, node.depth + 1, c.token, node.matches});
    std::push_heap(heap_.begin(), heap_.end());
  }
}

// The longest suffix of the matched context, with `token` behind it, that the text has.
SuffixPool::Match SuffixPool::follow(const SuffixAutomaton& text, Match at, uint32_t token) {
  for (; at.state >= 0; at.state = text.link(at.state)) {
    at.length = std::min(at.length, text.length(at.state));
    const int32_t next = text.next(at.state, token);
    if (next < 0) continue;
    at.length = std::min(at.length + 1, kContext);
    return {text.settle(next, at.length), at.length};
  }
  return {0, 0};
}

void SuffixPool::propose(const DraftRequest* requests, int64_t count, double min_chance, int64_t* indptr, int64_t* tokens,
                         int64_t* parents, double* chances) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    const DraftRequest& r = requests[i];
    Sample& s = sample(r.sample);
    indptr[i] = at;
    tokens[at] = parents[at] = -1, chances[at] = 1.0;
    int32_t nodes = 1;
    heap_.clear();
    if (r.max_depth > 0 && r.max_nodes > 1) expand(r, s, {1.0, -1, 0, 0, matches(s)}, 0, min_chance);
    for (; nodes < r.max_nodes && !heap_.empty(); ++nodes) {
      std::pop_heap(heap_.begin(), heap_.end());
      Node node = heap_.back();
      heap_.pop_back();
      tokens[at + nodes] = node.token, parents[at + nodes] = node.parent, chances[at + nodes] = node.chance;
      if (node.depth >= r.max_depth || holds(s.stops, node.token)) continue;
      const Texts all = texts(s);
      for (int32_t j = 0; j < kSources; ++j) node.matches[j] = follow(*all[j], node.matches[j], node.token);
      expand(r, s, node, nodes, min_chance);
    }
    at += nodes;
  }
  indptr[count] = at;
}

int64_t SuffixPool::occurrences(const std::string& key, const int64_t* tokens, int64_t count) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = index_.find(key);
  if (found == index_.end()) return -1;
  const SuffixAutomaton& text = found->second->text.automaton;
  int32_t state = 0;
  for (int64_t i = 0; i < count && state >= 0; ++i) state = text.next(state, static_cast<uint32_t>(tokens[i]));
  return state < 0 ? 0 : text.occurrences(state);
}

}  // namespace tlt
