// The format interface: what goes over the wire for one or more events and what the answer says
// about each. One file a format (format_*.cpp); adding one means that file, a line in formats.hpp
// and in find_format, and its tests.
#pragma once

#include <span>

#include "core/types.hpp"
#include "core/url.hpp"

namespace outbox::core {

// Where a lane's requests go and what all of them carry; one per configuration, shared by all
// requests.
struct Target {
    Endpoint endpoint;
    std::vector<Header> fixed_headers; // checked; sent after the format's, before the event's own
    std::string source;                // CloudEvents source, a URI reference
};

struct FormatLimits {
    std::size_t max_events = 1; // of one request
};

struct BuildResult {
    bool ok = false;
    Request request;   // when ok
    std::string error; // otherwise: why, without repeating a value
};

class Format {
  public:
    [[nodiscard]] virtual std::string_view name() const noexcept = 0;
    [[nodiscard]] virtual FormatLimits limits() const noexcept = 0;
    // events: 1..limits().max_events, in the order of the request.
    [[nodiscard]] virtual BuildResult build(std::span<const Event* const> events,
                                            const Target& target) const = 0;
    // A verdict for each of the n events of the request.
    [[nodiscard]] virtual std::vector<Verdict> classify(const Answer& answer, std::size_t n) const;

  protected:
    // Formats live for ever: nobody deletes one, and none needs a destructor at exit.
    ~Format() = default;
};

// The format of that name (cloudevents, json, payload), or null. The object lives for ever.
[[nodiscard]] const Format* find_format(std::string_view name) noexcept;

// Shared by the formats.
// Appends the event's own headers and the replay mark, checked; false and `error` set at the first
// bad one, or when the column was no object of strings. One with the name of a fixed header stays
// out: who writes events must not speak for the operator.
[[nodiscard]] bool append_event_headers(const Event& event, const std::vector<Header>& fixed,
                                        std::vector<Header>& out, std::string& error);
// A JSON string literal, RFC 8259: quotes, backslash and controls (DEL too) escaped, other UTF-8 as
// it is.
void append_json_string(std::string& out, std::string_view text);
// RFC 3339 UTC with microseconds, e.g. 2026-11-30T20:44:32.000001Z. `unix_time` in years 0001-9999.
[[nodiscard]] std::string rfc3339(Micros unix_time);
// seq as 19 digits, so that it sorts as text. A negative one (an identity column can be set back):
// a minus sign and at least 18 digits, which sorts before all others, but in reverse among its own.
[[nodiscard]] std::string sequence_text(std::int64_t seq);

} // namespace outbox::core
