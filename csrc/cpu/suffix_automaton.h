// A generalised suffix automaton that grows online (Blumer et al. 1985, for several strings Mohri et al. 2009), with
// the number of occurrences of every substring up to kCounted tokens. Knows nothing of prompts, samples or budgets.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tlt {

// Longest context that is looked up. Without a cap every token of a looped output "aaaa..." walks one suffix link per
// earlier token: 92 us a token at 16k tokens, against 6 us with it, on one busy core (bench/model_free_offline.py).
constexpr int32_t kContext = 32;

class SuffixAutomaton {
 public:
  static constexpr int32_t kCounted = kContext + 1;  // a context and the token after it

  // Where one string ends. `whole` is the class of the entire string, `tail` that of its last min(length, kCounted)
  // tokens. Later splits may move that tail to a suffix link of `tail`; `settle` follows it.
  struct Cursor {
    int32_t whole = 0;
    int32_t tail = 0;
    int32_t length = 0;
  };

  struct Edge {
    uint32_t token;
    int32_t target;
    int32_t next;  // of the same state, -1 at the end
  };

  SuffixAutomaton();

  // Append a token to the string that ends at `cursor`, and count the new occurrences.
  void append(Cursor& cursor, uint32_t token);

  // The class that holds the suffix of `length` tokens of any member of `state`, counting from the long end.
  int32_t settle(int32_t state, int32_t length) const {
    while (state > 0 && states_[states_[state].link].length >= length) state = states_[state].link;
    return state;
  }

  int32_t link(int32_t state) const { return states_[state].link; }          // -1 for the empty string (state 0)
  int32_t length(int32_t state) const { return states_[state].length; }      // of the longest member
  int32_t occurrences(int32_t state) const { return states_[state].count; }  // exact up to kCounted tokens
  int32_t degree(int32_t state) const { return states_[state].degree; }
  int32_t first_edge(int32_t state) const { return states_[state].edge; }
  const Edge& edge(int32_t index) const { return edges_[index]; }
  int32_t next(int32_t state, uint32_t token) const;  // -1 where there is none

  int64_t bytes() const;

 private:
  struct State {
    int32_t length, link, count, edge, degree;
  };
  struct Slot {
    int32_t state, edge;  // edge -1: free
  };

  int32_t find(int32_t state, uint32_t token) const;
  int32_t extend(int32_t last, uint32_t token);
  int32_t split(int32_t parent, int32_t state, uint32_t token);
  int32_t add_state(int32_t length, int32_t link, int32_t count);
  void add_edge(int32_t state, uint32_t token, int32_t target);
  void index(int32_t state, int32_t edge);
  size_t slot_of(int32_t state, uint32_t token) const;

  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<Slot> slots_;  // open addressing, edges of states of many edges only
  size_t indexed_ = 0;
};

}  // namespace tlt
