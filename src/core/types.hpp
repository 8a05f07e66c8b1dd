// Plain data that every room shares: the event as it was claimed, the answer to a request, and
// what the answer means. No behaviour beyond construction and comparison; no clock, no I/O.
#pragma once

#ifdef POSTGRES_H
#error "core must not see postgres.h"
#endif

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace outbox::core {

// A duration, or an instant counted from an epoch that the name tells; microseconds.
using Micros = std::int64_t;

constexpr Micros kMillisecond = 1'000;
constexpr Micros kSecond = 1'000'000;
constexpr Micros kHour = 3'600 * kSecond;

// RFC 9562 UUID in network byte order.
struct Uuid {
    std::array<std::uint8_t, 16> bytes{};
    auto operator<=>(const Uuid&) const = default;
    // Lower-case canonical text, 36 characters.
    [[nodiscard]] std::string text() const;
};

struct UuidHash {
    std::size_t operator()(const Uuid& id) const noexcept;
};

// One HTTP header field: a name without colon and its value, without line end.
struct Header {
    std::string name;
    std::string value;
    bool operator==(const Header&) const = default;
};

// Where the claimed row version was and what it said, so that a result is recorded only if nobody
// changed it meanwhile. core and net carry it and never look inside.
struct RowVersion {
    std::uint32_t block = 0;
    std::uint16_t offset = 0;
    std::int64_t retry_after = 0; // as claimed, PostgreSQL's microseconds; see has_retry_after
    bool has_retry_after = false;
};

struct Event {
    Uuid id;
    std::int64_t seq = 0;
    std::string aggregate_type; // the lane
    std::string aggregate_id;
    std::string event_type;
    std::string payload;         // the bytes of payload::text
    std::vector<Header> headers; // the headers column, without the replay mark
    // Why the headers column is not an object of strings; empty when it is.
    std::string headers_error;
    // Why the row could not be read; empty when it was. Such an event fails without being sent.
    std::string unreadable;
    bool replay = false; // sent again by outbox_replay
    // Unix time; absent when RFC 3339 cannot express it (infinity, years beyond 0001-9999).
    std::optional<Micros> created_at;
    std::int32_t attempts = 0;
    RowVersion row;
};

// One HTTP request, ready for the engine. The method is always POST.
struct Request {
    std::string url;
    std::vector<Header> headers;
    std::string body;
};

// How far a request came.
enum class Transport : std::uint8_t {
    complete,    // a complete answer arrived; Answer::status is set
    not_sent,    // nothing could be sent: name lookup, connect, TLS
    interrupted, // sent at least in part, no complete answer: timeout, reset, cut, nonsense
    aborted,     // given up by ourselves
};

struct Answer {
    Transport transport = Transport::aborted;
    int status = 0;                    // 100-999; 0 when none arrived
    std::optional<Micros> retry_after; // from Retry-After, as a delay; not yet capped
    std::string body;                  // its first bytes, any bytes
    std::string error;                 // the transport's words; empty when complete
};

// What an answer means for its event (DESIGN 1.4).
enum class Outcome : std::uint8_t {
    delivered,
    lane_failure,  // waits; the attempt is not counted
    event_failure, // attempts + 1
    unbuildable,   // dead at once
    aborted,       // unchanged
};

struct Verdict {
    Outcome outcome = Outcome::aborted;
    std::optional<Micros> retry_after; // capped, >= 0; set only where the receiver asked for it
    std::string error;                 // for last_error: valid UTF-8, <= 1 kB; empty if delivered
};

} // namespace outbox::core
