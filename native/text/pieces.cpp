#include "text/pieces.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <queue>
#include <random>

namespace quire {
namespace {

constexpr std::string_view kMark = "\xE2\x96\x81";  // "▁"
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
constexpr uint64_t kFree = ~uint64_t{0};

// A file must not be able to choose texts that collide.
const uint64_t kSeed = std::random_device{}() | uint64_t{std::random_device{}()} << 32;

uint64_t mixed(uint64_t value) {
  value *= kFactor;
  return value ^ (value >> 32);
}

uint64_t hash_of(std::string_view text) {
  uint64_t hash = kSeed ^ text.size(), part;
  for (; text.size() >= sizeof part; text.remove_prefix(sizeof part)) {
    std::memcpy(&part, text.data(), sizeof part);
    hash = mixed(hash ^ part);
  }
  part = 0;
  std::memcpy(&part, text.data(), text.size());
  return mixed(mixed(hash ^ part));
}

size_t char_bytes(char first) {
  const int ones = std::countl_one(static_cast<uint8_t>(first));
  return ones == 0 ? 1 : static_cast<size_t>(ones);
}

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

uint64_t hash_of_pair(uint64_t pair) { return mixed(mixed(kSeed ^ pair)); }

}  // namespace

PieceTable::PieceTable(size_t num_tokens)
    : slots_(std::bit_ceil(2 * num_tokens + 1), Slot{0, kNone}), mask_(slots_.size() - 1) {
  pieces_.reserve(num_tokens);
}

bool PieceTable::add(std::string_view text, double score) {
  const auto starts_char = [](char byte) { return (byte & 0xC0) != 0x80; };
  const auto num_chars = static_cast<uint32_t>(std::count_if(text.begin(), text.end(), starts_char));
  pieces_.push_back({texts_.size(), static_cast<uint32_t>(text.size()), num_chars, score});
  texts_ += text;
  longest_ = std::max(longest_, text.size());
  if (text.empty()) return true;
  const uint64_t hash = hash_of(text);
  const auto tag = static_cast<uint32_t>(hash >> 32);
  uint64_t at = hash & mask_;
  for (; slots_[at].id != kNone; at = (at + 1) & mask_)
    if (slots_[at].tag == tag && this->text(slots_[at].id) == text) return false;
  slots_[at] = {tag, size() - 1};
  return true;
}

int32_t PieceTable::find(std::string_view text) const { return find(text, hash_of(text)); }

std::array<int32_t, PieceTable::kAtOnce> PieceTable::find(const std::array<std::string_view, kAtOnce>& texts) const {
  std::array<uint64_t, kAtOnce> hashes;
  for (size_t at = 0; at < kAtOnce; ++at) {
    hashes[at] = hash_of(texts[at]);
    __builtin_prefetch(&slots_[hashes[at] & mask_]);
  }
  for (const uint64_t hash : hashes)
    if (const Slot& slot = slots_[hash & mask_]; slot.id != kNone) __builtin_prefetch(&pieces_[slot.id]);
  for (const uint64_t hash : hashes)
    if (const Slot& slot = slots_[hash & mask_]; slot.id != kNone)
      __builtin_prefetch(texts_.data() + pieces_[slot.id].start);
  std::array<int32_t, kAtOnce> ids;
  for (size_t at = 0; at < kAtOnce; ++at) ids[at] = find(texts[at], hashes[at]);
  return ids;
}

int32_t PieceTable::find(std::string_view text, uint64_t hash) const {
  if (text.empty() || text.size() > longest_) return kNone;
  const auto tag = static_cast<uint32_t>(hash >> 32);
  for (uint64_t at = hash & mask_; slots_[at].id != kNone; at = (at + 1) & mask_)
    if (slots_[at].tag == tag && this->text(slots_[at].id) == text) return slots_[at].id;
  return kNone;
}

// Of equal scores the longest left side is first, then the longest right side, the piece with the smallest id, and the
// place nearest the start: the order of Hugging Face's conversion of scores to merges.
bool Pieces::Candidate::operator<(const Candidate& other) const {
  if (priority != other.priority) return priority < other.priority;
  if (left_chars != other.left_chars) return left_chars < other.left_chars;
  if (right_chars != other.right_chars) return right_chars < other.right_chars;
  if (id != other.id) return id > other.id;
  return position > other.position;
}

Pieces::Pieces(PieceTable table, const std::vector<int32_t>& matched, int32_t unknown, bool marks_start)
    : table_(std::move(table)),
      is_matched_(table_.size()),
      match_lengths_(256),
      bytes_(256),
      unknown_(unknown),
      marks_start_(marks_start) {
  for (const int32_t id : matched) {
    const std::string_view text = table_.text(id);
    if (text.empty()) continue;
    is_matched_[id] = 1;
    match_lengths_[static_cast<uint8_t>(text[0])].push_back(static_cast<uint32_t>(text.size()));
  }
  for (auto& lengths : match_lengths_) {
    std::sort(lengths.rbegin(), lengths.rend());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  }
  for (int byte = 0; byte < 256; ++byte) {
    char text[8];
    const int length = std::snprintf(text, sizeof text, "<0x%02X>", byte);
    bytes_[byte] = table_.find({text, static_cast<size_t>(length)});
  }
}

size_t Pieces::set_merges(const std::vector<std::string_view>& lines) {
  merges_.assign(std::bit_ceil(2 * lines.size() + 1), {kFree, {}});
  merge_mask_ = merges_.size() - 1;
  constexpr size_t kBlock = PieceTable::kAtOnce / 3;
  std::array<std::string_view, PieceTable::kAtOnce> texts;
  std::array<std::string, kBlock> wholes;
  for (size_t first = 0; first < lines.size(); first += kBlock) {
    const size_t end = std::min(first + kBlock, lines.size());
    texts.fill({});
    for (size_t number = first; number < end; ++number) {
      const std::string_view line = lines[number];
      const size_t space = line.find(' '), at = number - first;
      if (space == 0 || space == std::string_view::npos) continue;  // no texts: no tokens
      wholes[at].assign(line.substr(0, space)).append(line.substr(space + 1));
      texts[3 * at] = line.substr(0, space), texts[3 * at + 1] = line.substr(space + 1), texts[3 * at + 2] = wholes[at];
    }
    const auto ids = table_.find(texts);
    for (size_t at = 0; at < 3 * (end - first); at += 3)
      __builtin_prefetch(&merges_[hash_of_pair(pair_of(ids[at], ids[at + 1])) & merge_mask_], 1);
    for (size_t number = first; number < end; ++number) {
      const int32_t* found = &ids[3 * (number - first)];
      if (std::find(found, found + 3, PieceTable::kNone) != found + 3) return number;
      const uint64_t pair = pair_of(found[0], found[1]);
      merges_[slot_of(pair)] = {pair, {-static_cast<double>(number), found[2]}};
    }
  }
  return lines.size();
}

size_t Pieces::slot_of(uint64_t pair) const {
  size_t at = hash_of_pair(pair) & merge_mask_;
  while (merges_[at].pair != pair && merges_[at].pair != kFree) at = (at + 1) & merge_mask_;
  return at;
}

bool Pieces::find_merge(int32_t left, int32_t right, Merge& found) const {
  if (!merges_.empty()) {
    const MergeSlot& slot = merges_[slot_of(pair_of(left, right))];
    found = slot.merge;
    return slot.pair != kFree;
  }
  if (std::isnan(table_[left].score) || std::isnan(table_[right].score)) return false;
  const std::string_view first = table_.text(left), second = table_.text(right);
  const size_t length = first.size() + second.size();
  if (length > table_.longest()) return false;
  char usual[256];
  std::string unusual;
  if (length > sizeof usual) unusual.resize(length);
  char* whole = unusual.empty() ? usual : unusual.data();
  std::memcpy(whole, first.data(), first.size());
  std::memcpy(whole + first.size(), second.data(), second.size());
  const int32_t id = table_.find({whole, length});
  if (id == PieceTable::kNone || std::isnan(table_[id].score)) return false;
  found = {table_[id].score, id};
  return true;
}

// Bytes of the longest matched token at a place, or 0.
uint32_t Pieces::match(std::string_view text, size_t at, int32_t& id) const {
  for (const uint32_t length : match_lengths_[static_cast<uint8_t>(text[at])]) {
    if (length > text.size() - at) continue;
    id = table_.find(text.substr(at, length));
    if (id != PieceTable::kNone && is_matched_[id]) return length;
  }
  return 0;
}

std::vector<int32_t> Pieces::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  size_t start = 0;
  for (size_t at = 0; at < text.size();) {
    int32_t id;
    const uint32_t length = match(text, at, id);
    if (length == 0) {
      ++at;
      continue;
    }
    encode_segment(text.substr(start, at - start), ids);
    ids.push_back(id);
    at += length;
    start = at;
  }
  encode_segment(text.substr(start), ids);
  return ids;
}

// Tokens of the characters: pieces, else bytes, else one unknown token for several in a row.
void Pieces::add_symbols(std::string_view normal, std::vector<Symbol>& symbols) const {
  bool has_unknown = false;
  const auto add = [&symbols](int32_t id) { symbols.push_back({id, 0, 0}); };
  for (size_t at = 0, length; at < normal.size(); at += length) {
    length = char_bytes(normal[at]);
    const std::string_view character = normal.substr(at, length);
    const int32_t id = table_.find(character);
    if (id != PieceTable::kNone) {
      if (has_unknown) add(unknown_);
      has_unknown = false;
      add(id);
      continue;
    }
    const auto byte_of = [this](char byte) { return bytes_[static_cast<uint8_t>(byte)]; };
    const bool has_bytes =
        std::all_of(character.begin(), character.end(), [&](char byte) { return byte_of(byte) != PieceTable::kNone; });
    if (has_bytes)
      for (const char byte : character) add(byte_of(byte));
    else
      has_unknown = has_unknown || unknown_ != PieceTable::kNone;
  }
  if (has_unknown) add(unknown_);
  for (size_t at = 0; at < symbols.size(); ++at) {
    symbols[at].previous = static_cast<int32_t>(at) - 1;
    symbols[at].next = at + 1 < symbols.size() ? static_cast<int32_t>(at) + 1 : -1;
  }
}

void Pieces::encode_segment(std::string_view text, std::vector<int32_t>& ids) const {
  if (text.empty()) return;
  std::string normal(marks_start_ ? kMark : "");
  normal.reserve(2 * text.size() + kMark.size());
  for (const char byte : text) byte == ' ' ? normal.append(kMark) : normal.append(1, byte);
  std::vector<Symbol> symbols;
  symbols.reserve(normal.size());
  add_symbols(normal, symbols);

  std::vector<Candidate> found;
  found.reserve(symbols.size());
  const auto candidate = [&](int32_t position, Candidate& made) {
    const Symbol& left = symbols[position];
    Merge merge;
    if (left.next < 0 || !find_merge(left.id, symbols[left.next].id, merge)) return false;
    const int32_t right_id = symbols[left.next].id;
    made = {merge.priority, table_[left.id].num_chars, table_[right_id].num_chars, merge.id, position, left.id,
            right_id};
    return true;
  };
  Candidate made;
  for (size_t at = 0; at < symbols.size(); ++at)
    if (candidate(static_cast<int32_t>(at), made)) found.push_back(made);
  std::priority_queue<Candidate> queue(std::less<Candidate>{}, std::move(found));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.position];
    Merge merge;
    // Others may have taken a side since; another cut of the same piece will do.
    if (left.id < 0 || left.next < 0) continue;
    const bool is_same = left.id == top.left && symbols[left.next].id == top.right;
    if (!is_same && (!find_merge(left.id, symbols[left.next].id, merge) || merge.id != top.id)) continue;
    Symbol& right = symbols[left.next];
    left.id = top.id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[left.next].previous = top.position;
    if (left.previous >= 0 && candidate(left.previous, made)) queue.push(made);
    if (candidate(top.position, made)) queue.push(made);
  }
  for (const Symbol& symbol : symbols)
    if (symbol.id >= 0) ids.push_back(symbol.id);
}

}  // namespace quire
