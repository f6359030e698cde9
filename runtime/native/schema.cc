#include "schema.h"

#include "errors.h"

namespace llmc {
namespace {

constexpr size_t kListed = 5;  // problems an error names before it counts the rest

const Json kNothing;

const char* kind_name(const Json& value) {
  static const char* const kNames[] = {"null",   "true or false", "an integer", "a number",
                                       "a text", "a list",        "an object"};
  return kNames[value.kind];
}

}  // namespace

Fields::Fields(const Json& value, std::string where, std::vector<std::string>* problems)
    : value_(value), where_(std::move(where)), problems_(problems) {
  if (!value.is_object()) problems_->push_back(where_ + ": got " + kind_name(value) + ", wanted an object");
}

const Json& Fields::any(const std::string& key) {
  asked_.insert(key);
  const Json* found = value_.find(key);
  if (!found && value_.is_object()) problems_->push_back(where_ + ": missing key '" + key + "'");
  return found ? *found : kNothing;
}

bool Fields::has(const std::string& key) const { return value_.find(key) != nullptr; }

const Json& Fields::object(const std::string& key) {
  const Json& value = any(key);
  if (!value.is_object()) wrong(key, "an object");
  return value;
}

std::string Fields::text(const std::string& key) {
  const Json& value = any(key);
  if (!value.is_text()) wrong(key, "a text");
  return value.text;
}

bool Fields::flag(const std::string& key) {
  const Json& value = any(key);
  if (value.kind != Json::kBool) wrong(key, "true or false");
  return value.flag;
}

int64_t Fields::whole(const std::string& key, int64_t low, int64_t high) {
  int64_t value;
  if (any(key).whole(low, high, &value)) return value;
  wrong(key, "an integer in " + std::to_string(low) + ".." + std::to_string(high));
  return low;
}

std::vector<int64_t> Fields::wholes(const std::string& key, int64_t low, int64_t high, size_t least) {
  std::vector<int64_t> out;
  for (const Json& item : list(key, least)) {
    int64_t value;
    if (item.whole(low, high, &value)) {
      out.push_back(value);
    } else {
      wrong(key, "integers in " + std::to_string(low) + ".." + std::to_string(high));
    }
  }
  return out;
}

std::vector<std::string> Fields::texts(const std::string& key, size_t least) {
  std::vector<std::string> out;
  for (const Json& item : list(key, least)) {
    if (item.is_text()) {
      out.push_back(item.text);
    } else {
      wrong(key, "texts");
    }
  }
  return out;
}

Fields Fields::fields(const std::string& key) { return Fields(any(key), where_ + "." + key, problems_); }

void Fields::each_member(const std::string& key, const std::function<void(const std::string&, Fields)>& each) {
  for (const auto& [name, item] : object(key).object) {
    each(name, Fields(item, where_ + "." + key + "." + shown(name), problems_));
  }
}

void Fields::each_item(const std::string& key, size_t least, const std::function<void(Fields)>& each) {
  size_t index = 0;
  for (const Json& item : list(key, least)) {
    each(Fields(item, where_ + "." + key + "[" + std::to_string(index++) + "]", problems_));
  }
}

const std::vector<Json>& Fields::list(const std::string& key, size_t least) {
  const Json& value = any(key);
  if (!value.is_list() || value.list.size() < least) wrong(key, "a list of " + std::to_string(least) + " or more");
  return value.list;
}

void Fields::done() {
  for (const auto& [key, item] : value_.object) {
    if (!asked_.count(key)) problems_->push_back(where_ + ": unknown key '" + shown(key) + "'");
  }
}

void Fields::wrong(const std::string& key, const std::string& wanted) {
  if (value_.find(key)) problems_->push_back(where_ + "." + key + ": wanted " + wanted);
}

void refuse(const std::string& path, const std::vector<std::string>& problems, const std::string& advice) {
  if (problems.empty()) return;
  std::string text = shown(path) + ": ";
  for (size_t i = 0; i < problems.size() && i < kListed; ++i) text += (i ? "; " : "") + problems[i];
  if (problems.size() > kListed) text += "; and " + std::to_string(problems.size() - kListed) + " more";
  throw ArtifactError(text + "; " + advice);
}

}  // namespace llmc
