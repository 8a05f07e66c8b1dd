// The endpoint: an http(s) URL with placeholders in path and query (DESIGN 1.3, 2.5), RFC 3986.
// Checks it once and fills it per event. Does not resolve, normalise or follow anything.
#pragma once

#include "core/types.hpp"

namespace outbox::core {

constexpr std::size_t kMaxUrlBytes = 8000;

class Endpoint {
  public:
    // Accepts http:// or https://, optional userinfo, a host (name, IPv4 or bracketed IPv6), an
    // optional port 0-65535, path and query. Refuses other schemes, an empty host, control
    // characters, space, backslash, non-ASCII, fragments, a percent sign that begins no escape,
    // unknown or unbalanced braces, placeholders before the path, more than kMaxUrlBytes, and an
    // encoded slash or backslash in a path segment with a placeholder (no event could use it). On
    // refusal returns nothing and sets `error` to a sentence fragment ("must ...") that says what
    // is allowed and does not repeat the URL (it may hold a secret).
    [[nodiscard]] static std::optional<Endpoint> parse(std::string_view text, std::string& error);

    // The URL for one event: values percent-encoded (all but unreserved characters of RFC 3986, per
    // UTF-8 byte, upper-case hex). Nothing, and `error` set to a reason without the value, when a
    // value used in the path, or the path segment that it ends up in, is empty, is or decodes
    // (percent-decoding repeated until nothing changes) to "." or "..", or holds, decoded, '/' or
    // '\'. In the query any value is encodable.
    [[nodiscard]] std::optional<std::string> expand(const Event& event, std::string& error) const;

    // For display: userinfo and the whole query replaced by "***"; placeholders in the path stay.
    [[nodiscard]] std::string redacted() const;

    // What of the URL must not be repeated: the password (or a userinfo without one) and the values
    // of the query, where they have at least four characters.
    [[nodiscard]] std::vector<std::string> secrets() const;

  private:
    enum class Field : std::uint8_t { literal, aggregate_type, aggregate_id, event_type };
    struct Piece {
        Field field = Field::literal;
        bool in_path = true;
        std::string text; // literal only
    };

    [[nodiscard]] std::string text() const;
    [[nodiscard]] static std::string_view placeholder(Field field) noexcept;
    [[nodiscard]] static std::string_view value(const Event& event, Field field) noexcept;
    [[nodiscard]] static Field leading_field(std::string_view text) noexcept;
    [[nodiscard]] bool split(std::string_view url);
    [[nodiscard]] std::string_view fill(const Event& event, std::string& url) const;

    std::vector<Piece> pieces_;
};

// Percent-encodes every byte but the unreserved characters of RFC 3986 (letters, digits, - . _ ~).
void append_percent_encoded(std::string& out, std::string_view value);

// Percent-encodes a header value as the CloudEvents HTTP binding 3.1.3.2 says: space, double quote,
// percent, and everything outside U+0021-U+007E, per UTF-8 byte, upper-case hex.
void append_header_encoded(std::string& out, std::string_view value);

} // namespace outbox::core
