#include "json.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "text.h"

namespace llmc {
namespace {

constexpr int kMostDepth = 200;       // of a value in a value; far from what the stack holds
constexpr int kMostValues = 8 << 20;  // a document of few bytes a value would take a hundred times its size in memory

class Parser {
 public:
  explicit Parser(std::string_view data) : data_(data) {}

  Json document() {
    Json value = this->value(0);
    skip_space();
    if (at_ != data_.size()) fail("something after the end");
    return value;
  }

 private:
  Json value(int depth) {
    if (depth > kMostDepth) fail("it is nested too deeply");
    if (++values_ > kMostValues) fail("it holds too many values");
    skip_space();
    Json value;
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return list(depth);
      case '"':
        value.kind = Json::kText;
        value.text = text();
        return value;
      case 't':
        return word("true", Json::kBool, true);
      case 'f':
        return word("false", Json::kBool, false);
      case 'n':
        return word("null", Json::kNull, false);
      default:
        return number();
    }
  }

  Json object(int depth) {
    Json value;
    value.kind = Json::kObject;
    for (bool first = true; !ends(first, '}'); first = false) {
      skip_space();
      if (peek() != '"') fail("wanted a key");
      std::string key = text();
      skip_space();
      take(':');
      if (!value.object.emplace(std::move(key), this->value(depth + 1)).second) fail("a key given twice");
    }
    return value;
  }

  Json list(int depth) {
    Json value;
    value.kind = Json::kList;
    for (bool first = true; !ends(first, ']'); first = false) value.list.push_back(this->value(depth + 1));
    return value;
  }

  // Whether the list or object that began ends here; else what stands between two of its values is taken.
  bool ends(bool first, char close) {
    if (first) ++at_;  // its opening bracket
    skip_space();
    if (peek() == close) {
      ++at_;
      return true;
    }
    if (!first) take(',');
    return false;
  }

  Json word(std::string_view word, Json::Kind kind, bool flag) {
    if (data_.substr(at_, word.size()) != word) fail("not a value");
    at_ += word.size();
    Json value;
    value.kind = kind;
    value.flag = flag;
    return value;
  }

  // https://www.rfc-editor.org/rfc/rfc8259#section-6
  Json number() {
    size_t start = at_;
    Json value;
    value.kind = Json::kWhole;
    if (peek() == '-') ++at_;
    if (peek() == '0') {
      ++at_;
    } else {
      digits();
    }
    if (peek() == '.') {
      value.kind = Json::kReal;
      ++at_;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      value.kind = Json::kReal;
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    value.text = std::string(data_.substr(start, at_ - start));
    if (value.kind == Json::kReal) value.text = real(value.text);
    if (value.text == "-0") value.text = "0";
    return value;
  }

  void digits() {
    if (peek() < '0' || peek() > '9') fail("not a value");
    while (peek() >= '0' && peek() <= '9') ++at_;
  }

  // A float as Python's repr: the shortest digits that read back as it, an exponent below 1e-4 and from 1e16 on.
  std::string real(const std::string& spelled) {
    double value = std::strtod(spelled.c_str(), nullptr);
    if (!std::isfinite(value)) fail("a number that is too large");
    char buffer[40];
    auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
    (void)error;  // 40 characters are enough
    std::string text(buffer, end);
    size_t e = text.find('e');
    int exponent = std::atoi(text.c_str() + e + 1);
    bool minus = text[0] == '-';
    std::string figures = text.substr(minus, 1) + (e > size_t(minus) + 2 ? text.substr(minus + 2, e - minus - 2) : "");
    std::string sign = minus ? "-" : "";
    int count = int(figures.size());
    if (exponent < -4 || exponent >= 16) {
      std::snprintf(buffer, sizeof buffer, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
      return sign + figures[0] + (count > 1 ? "." + figures.substr(1) : "") + buffer;
    }
    if (exponent < 0) return sign + "0." + std::string(size_t(-exponent - 1), '0') + figures;
    if (count <= exponent + 1) return sign + figures + std::string(size_t(exponent + 1 - count), '0') + ".0";
    return sign + figures.substr(0, size_t(exponent) + 1) + "." + figures.substr(size_t(exponent) + 1);
  }

  std::string text() {
    std::string out;
    for (++at_; peek() != '"';) {
      unsigned char c = static_cast<unsigned char>(peek());
      if (c < 0x20) fail(at_ < data_.size() ? "a control character in a text" : "it ends too early");
      if (c != '\\') {
        out += data_[at_++];
        continue;
      }
      ++at_;
      static constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
      size_t which = kEscapes.find(peek());
      if (peek() == 'u') {
        append_utf8(escaped(), &out);
      } else if (which != std::string_view::npos) {
        out += kMeant[which];
        ++at_;
      } else {
        fail("an unknown escape");
      }
    }
    ++at_;
    if (!is_utf8(out)) fail("text that is not Unicode");
    return out;
  }

  char32_t escaped() {
    char32_t first = unit();
    if (first < 0xD800 || first > 0xDFFF) return first;
    if (first > 0xDBFF || data_.substr(at_, 2) != "\\u") fail("half of a surrogate pair");
    ++at_;
    char32_t second = unit();
    if (second < 0xDC00 || second > 0xDFFF) fail("half of a surrogate pair");
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }

  char32_t unit() {
    char32_t value = 0;
    ++at_;  // the u
    for (int i = 0; i < 4; ++i, ++at_) {
      char c = peek();
      size_t digit = std::string_view("0123456789abcdefABCDEF").find(c);
      if (digit == std::string_view::npos) fail("an escape without four digits");
      value = 16 * value + char32_t(digit < 16 ? digit : digit - 6);
    }
    return value;
  }

  char peek() const { return at_ < data_.size() ? data_[at_] : '\0'; }

  void take(char wanted) {
    if (peek() != wanted) fail(std::string("wanted ") + wanted);
    ++at_;
  }

  void skip_space() {
    while (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t') ++at_;
  }

  [[noreturn]] void fail(const std::string& reason) const {
    std::string what = at_ < data_.size() ? reason : "it ends too early";
    throw std::invalid_argument(what + " (byte " + std::to_string(at_) + ")");
  }

  std::string_view data_;
  size_t at_ = 0;
  int values_ = 0;
};

void write_text(const std::string& text, std::string* out) {
  static constexpr std::string_view kEscaped = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
  *out += '"';
  for (char c : text) {
    size_t which = kEscaped.find(c);
    char buffer[8];
    if (which != std::string_view::npos) {
      *out += '\\';
      *out += kLetters[which];
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(buffer, sizeof buffer, "\\u%04x", unsigned(c));
      *out += buffer;
    } else {
      *out += c;
    }
  }
  *out += '"';
}

void write(const Json& value, const std::string& skip, std::string* out) {
  const char* comma = "";
  switch (value.kind) {
    case Json::kNull:
      *out += "null";
      break;
    case Json::kBool:
      *out += value.flag ? "true" : "false";
      break;
    case Json::kWhole:
    case Json::kReal:
      *out += value.text;
      break;
    case Json::kText:
      write_text(value.text, out);
      break;
    case Json::kList:
      *out += '[';
      for (const Json& item : value.list) {
        *out += comma;
        write(item, "", out);
        comma = ",";
      }
      *out += ']';
      break;
    case Json::kObject:
      *out += '{';
      for (const auto& [key, item] : value.object) {
        if (!skip.empty() && key == skip) continue;
        *out += comma;
        write_text(key, out);
        *out += ':';
        write(item, "", out);
        comma = ",";
      }
      *out += '}';
      break;
  }
}

}  // namespace

bool Json::whole(int64_t low, int64_t high, int64_t* value) const {
  if (kind != kWhole) return false;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && low <= *value && *value <= high;
}

const Json* Json::find(const std::string& key) const {
  auto found = object.find(key);
  return found == object.end() ? nullptr : &found->second;
}

const Json& Json::get(const std::string& key) const {
  static const Json kNothing;
  const Json* found = find(key);
  return found ? *found : kNothing;
}

std::vector<Json> Json::steps(const std::string& key) const {
  if (!is_object()) return {};
  return get("type").text == "Sequence" ? get(key).list : std::vector<Json>{*this};
}

Json parse_json(std::string_view data) { return Parser(data).document(); }

std::string canonical_json(const Json& value, const std::string& skip) {
  std::string out;
  write(value, skip, &out);
  return out;
}

}  // namespace llmc
