// What goes wrong, as exceptions inside the library; llmc.cc turns them into statuses and one line of text.

#pragma once

#include <stdexcept>
#include <string>

#include "llmc.h"

namespace llmc {

class Error : public std::runtime_error {
 public:
  Error(llmc_status kind, const std::string& message) : std::runtime_error(message), status(kind) {}
  const llmc_status status;
};

// The artifact is damaged, not an artifact, or not for this machine.
struct ArtifactError : Error {
  explicit ArtifactError(const std::string& message) : Error(LLMC_ARTIFACT, message) {}
};

// The call asks for what the model cannot give.
struct RequestError : Error {
  explicit RequestError(const std::string& message) : Error(LLMC_REQUEST, message) {}
};

// Text of the artifact's own choice, on one line and not too long.
std::string shown(const std::string& text);

}  // namespace llmc
