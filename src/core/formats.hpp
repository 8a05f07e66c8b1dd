// What the format_*.cpp share with format.cpp and nobody else needs.
#pragma once

#include "core/format.hpp"

namespace outbox::core {

[[nodiscard]] const Format& cloudevents_format() noexcept;
[[nodiscard]] const Format& json_format() noexcept;
[[nodiscard]] const Format& payload_format() noexcept;

// The fields that every request with a JSON body for one event begins with.
[[nodiscard]] std::vector<Header> leading_headers(const Event& event);

// Appends `name` with a value that may hold anything, percent-encoded.
void append_encoded_header(std::vector<Header>& out, std::string_view name, std::string_view value);

// The request for one event: the format's own `headers` and `body`, completed by what every request
// carries. Not ok when the event cannot be sent to that target.
[[nodiscard]] BuildResult complete_request(const Event& event, const Target& target,
                                           std::vector<Header> headers, std::string body);

} // namespace outbox::core
