// What an answer means (DESIGN 1.4), and the words that last_error keeps of it. Decides about one
// request; whether a lane is healthy is the dispatcher's business.
#pragma once

#include "core/types.hpp"

namespace outbox::core {

constexpr std::size_t kMaxErrorBytes = 1000;

// Classifies an answer to a request by transport and status: 2xx delivered; nothing sent, 429, 502,
// 503 and 504 lane_failure; everything else that was sent event_failure; aborted stays aborted. The
// error is "status 503: <first bytes of the body>", or the transport's words.
[[nodiscard]] Verdict judge(const Answer& answer);

// A request that could not be built. The reason must not repeat the offending value.
[[nodiscard]] Verdict unbuildable(std::string_view reason);

// Replaces each of the secrets in the text by ***; for words of a receiver that repeats what it was
// sent.
void redact(std::string& text, const std::vector<std::string>& secrets);

// Any bytes as valid UTF-8 of at most `limit` bytes that PostgreSQL can store as text: each invalid
// sequence becomes U+FFFD, control characters (NUL, DEL, C1 included) become a space, runs of them
// one; cut at a character.
[[nodiscard]] std::string printable(std::string_view bytes, std::size_t limit);

} // namespace outbox::core
