// The model-free drafter's memory: a suffix automaton for each prompt, over the prompt, its running samples and earlier
// rollouts, one more over the outputs of all prompts, and the draft trees read off them. Knows neither logits nor the
// engine: a proposal is a guess.
#pragma once
#include <array>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpu/suffix_automaton.h"

namespace tlt {

// Weights of a mixture of contexts (Jelinek and Mercer 1980): the share of its mass that a context leaves to the shorter
// ones, learned online by EM for contexts alike in suffix length, occurrences, distinct continuations and whose text it
// is. Starts at PPM-C's distinct / (occurrences + distinct).
class Escapes {
 public:
  Escapes();
  static int32_t cell(int32_t length, int32_t total, int32_t distinct, int32_t source);
  float share(int32_t cell) const { return escaped_[cell] / seen_[cell]; }
  void learn(int32_t cell, float weight, float escaped);

 private:
  static constexpr int32_t kCells = 8 * 6 * 4 * 2;
  std::array<float, kCells> escaped_, seen_;
};

// Turns raw estimates into frequencies: how often drafts of like estimates turned out right, learned online, with and
// without noise apart. The race of log q + g is as sharp as q is true, and that differs from model to model.
class Forecasts {
 public:
  Forecasts();
  float chance(float raw, bool greedy) const;
  void learn(float raw, bool greedy, bool right);

 private:
  static constexpr int32_t kBins = 12;
  static int32_t bin(float raw, bool greedy);
  std::array<float, 2 * kBins> right_, expected_;
};

struct Tuning {
  float sharpness;     // beta: share of a child = softmax(beta * (log q + g)) over the candidates and the unseen
  float unseen_noise;  // the g that the unseen tokens' best is taken to have
};

// One row of `propose`: all int64, so that Python can build the table from one flat list.
struct DraftRequest {
  int64_t sample;     // handle
  int64_t key;        // noise identity
  int64_t position;   // of a token drawn at the root
  int64_t index;      // sample index
  int64_t segment;
  int64_t greedy;     // 1: no noise
  int64_t barred;     // stop ids may not be drawn at the first `barred` levels
  int64_t max_nodes;  // root included
  int64_t max_depth;
  int64_t top_k;
};

class SuffixPool {
 public:
  // across_prompts: keep the common text too. It gets at most half of the budget, and starts anew when that is full.
  SuffixPool(int64_t byte_budget, Tuning tuning, bool across_prompts);

  // A new sample of the prompt whose text group is `key`. stops: ids with nothing behind them; allowed: the only ids to
  // propose (empty: all). Both sorted here. Returns a handle.
  int64_t open(const std::string& key, const int64_t* prompt, int64_t prompt_len, const int64_t* stops,
               int64_t num_stops, const int64_t* allowed, int64_t num_allowed);
  // Append tokens[indptr[i] : indptr[i + 1]] to sample handles[i]; then drop text over the budget.
  void append(const int64_t* handles, const int64_t* indptr, int64_t count, const int64_t* tokens);
  // The trees, packed in order of the requests: node 0 of each is a placeholder (token -1, parent -1, chance 1) for the
  // root. Outputs have room for the sum of max_nodes. indptr [count + 1].
  void propose(const DraftRequest* requests, int64_t count, double min_chance, int64_t* indptr, int64_t* tokens,
               int64_t* parents, double* chances);
  // The sample has ended: its text stays, its handle does not.
  void close(int64_t handle);

  int64_t bytes() const { return used_; }
  int64_t groups() const { return static_cast<int64_t>(index_.size()); }
  int64_t samples() const { return static_cast<int64_t>(samples_.size()); }
  // Occurrences of `tokens` in the text of group `key`, at most SuffixAutomaton::kCounted of them; -1: no such group.
  int64_t occurrences(const std::string& key, const int64_t* tokens, int64_t count) const;

 private:
  struct Text {
    SuffixAutomaton automaton;
    int64_t resets = 0;
  };
  struct Place {  // where a sample ends in a text
    SuffixAutomaton::Cursor cursor;
    int64_t resets = 0;  // the text's when the cursor was valid
  };
  struct Match {  // a class and how many tokens of context it stands for
    int32_t state, length;
  };
  // Sources of a prediction, in order of preference at equal context lengths.
  enum Source { kOwn, kCommon, kSources };
  using Texts = std::array<const SuffixAutomaton*, kSources>;
  using Matches = std::array<Match, kSources>;

  struct Candidate {
    uint32_t token;
    float chance;  // q, then the share that wins given the noise
  };

  struct Group {
    std::string key;
    Text text;
    Place prompt_end;
    int64_t live = 0;
  };
  using GroupRef = std::list<Group>::iterator;
  struct Sample {
    GroupRef group;
    std::array<Place, kSources> places;
    std::vector<uint32_t> stops, allowed;
    std::vector<Candidate> pending;  // children proposed for the root, with raw estimates, until the token is known
    bool pending_greedy = false;
  };
  struct Level {  // one context; its continuations are hits_[first : first of the next level]
    int32_t cell;
    float total;
    size_t first;
  };
  struct Hit {
    size_t candidate;
    float count;
  };
  struct Node {
    double chance;  // of the whole path
    int32_t parent, depth;
    uint32_t token;
    Matches matches;  // of the parent until the node is placed
    bool operator<(const Node& other) const { return chance < other.chance; }
  };

  Sample& sample(int64_t handle);
  void touch(GroupRef group) { groups_.splice(groups_.begin(), groups_, group); }
  static int64_t size_of(const Group& group);
  static void forget(Text& text);
  void enforce_budget();
  void add(Text& text, Place& place, const int64_t* tokens, int64_t count);
  Texts texts(const Sample& sample) const { return {&sample.group->text.automaton, &common_.automaton}; }
  Matches matches(const Sample& sample) const;
  static Match follow(const SuffixAutomaton& text, Match at, uint32_t token);
  void collect(const Texts& texts, Matches at);
  void add_level(const SuffixAutomaton& text, int32_t state, int32_t length, int32_t source);
  void learn(const Sample& sample, uint32_t token);
  float predict(const Texts& texts, const Matches& at);
  void check_forecast(Sample& sample, uint32_t token);
  void weigh(const DraftRequest& request, int32_t depth, float escape);
  void expand(const DraftRequest& request, Sample& from, const Node& node, int32_t index, double min_chance);

  int64_t budget_;
  bool across_prompts_;
  int64_t used_ = 0;  // sum of size_of over all groups, and the common text
  Tuning tuning_;
  Escapes escapes_;
  Forecasts forecasts_;
  Text common_;
  std::list<Group> groups_;  // most recently used first
  std::unordered_map<std::string, GroupRef> index_;
  std::unordered_map<int64_t, Sample> samples_;
  int64_t next_handle_ = 1;
  std::vector<Candidate> candidates_;  // scratch of one prediction, as levels_ and hits_
  std::vector<Level> levels_;
  std::vector<Hit> hits_;
  std::vector<Node> heap_;             // scratch of one tree
  mutable std::mutex mutex_;           // calls come with the GIL released
};

}  // namespace tlt
