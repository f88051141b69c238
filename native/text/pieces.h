// SentencePiece BPE: text to token ids by the pieces of a vocabulary and their scores, or by merges.
//
// The same ids as the tokenizers library gives for the merges that follow from the scores, without making these: of
// 262,144 pieces they are 515,000, which take the library and Python 2 to 5 s.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace quire {

// A token of the vocabulary. `score`: NaN if it takes no part in merges, as control tokens and bytes.
struct Piece {
  uint64_t start;  // in the buffer of all texts
  uint32_t num_bytes, num_chars;
  double score;
};

// Texts of all tokens in one buffer, and a hash table from a text to its id. A text of no bytes is no token.
class PieceTable {
 public:
  static constexpr int32_t kNone = -1;
  static constexpr size_t kAtOnce = 48;

  explicit PieceTable(size_t num_tokens);
  // Adds the next token. Returns false if an earlier one has the same text.
  bool add(std::string_view text, double score);
  int32_t find(std::string_view text) const;
  // The ids of several texts, of which the memory is fetched at once: lookups in 20 MB wait for memory else.
  std::array<int32_t, kAtOnce> find(const std::array<std::string_view, kAtOnce>& texts) const;
  const Piece& operator[](int32_t id) const { return pieces_[id]; }
  std::string_view text(int32_t id) const { return {texts_.data() + pieces_[id].start, pieces_[id].num_bytes}; }
  int32_t size() const { return static_cast<int32_t>(pieces_.size()); }
  size_t longest() const { return longest_; }

 private:
  struct Slot {
    uint32_t tag;
    int32_t id;
  };

  int32_t find(std::string_view text, uint64_t hash) const;

  std::string texts_;
  std::vector<Piece> pieces_;
  std::vector<Slot> slots_;
  uint64_t mask_;
  size_t longest_ = 0;
};

class Pieces {
 public:
  // Of neighbours that are a piece together, those with the highest score are merged first. `matched`: tokens that a
  // text's first cut looks for, the longest first. `unknown`: the token of characters without a piece and without
  // bytes, or kNone. `marks_start`: each text between matched tokens begins with "▁".
  Pieces(PieceTable table, const std::vector<int32_t>& matched, int32_t unknown, bool marks_start);

  // Makes these the only merges: "left right" each, the first one is done first. Returns the number of the first that
  // has no space inside, or whose parts or whole are no tokens; else how many there are.
  size_t set_merges(const std::vector<std::string_view>& lines);

  // Token ids of UTF-8 text. Thread-safe.
  std::vector<int32_t> encode(std::string_view text) const;

  const PieceTable& table() const { return table_; }

 private:
  struct Merge {
    double priority;  // the score; of merges in order, minus the number
    int32_t id;
  };
  struct MergeSlot {
    uint64_t pair;
    Merge merge;
  };
  struct Symbol {
    int32_t id, previous, next;
  };
  struct Candidate {
    double priority;
    uint32_t left_chars, right_chars;
    int32_t id, position, left, right;
    bool operator<(const Candidate& other) const;
  };

  bool find_merge(int32_t left, int32_t right, Merge& found) const;
  size_t slot_of(uint64_t pair) const;
  uint32_t match(std::string_view text, size_t at, int32_t& id) const;
  void encode_segment(std::string_view text, std::vector<int32_t>& ids) const;
  void add_symbols(std::string_view normal, std::vector<Symbol>& symbols) const;

  PieceTable table_;
  std::vector<uint8_t> is_matched_;
  std::vector<std::vector<uint32_t>> match_lengths_;  // by first byte, longest first
  std::vector<int32_t> bytes_;                        // the tokens "<0x00>" … "<0xFF>", or kNone
  std::vector<MergeSlot> merges_;                     // empty: pieces merge in the order of their scores
  uint64_t merge_mask_ = 0;
  int32_t unknown_;
  bool marks_start_;
};

}  // namespace quire
