// Reading an endpoint once, filling it per event, and the percent-encodings of URLs and header
// values. The guard against path traversal lives here: what a table writer chooses may name a path
// segment but never end, skip or leave one. Must not repeat a URL or a value in a reason.
#include "core/url.hpp"

#include <algorithm>
#include <charconv>

#include "core/ascii.hpp"

namespace outbox::core {

namespace {

using namespace std::string_view_literals;

constexpr auto npos = std::string_view::npos;

// ---------------------------------------------------------------------------------------------
// Encoding and decoding

void append_escape(std::string& out, char c) {
    constexpr std::string_view kDigits = "0123456789ABCDEF";
    const auto byte = static_cast<unsigned char>(c);
    out += '%';
    out += kDigits[byte >> 4U];
    out += kDigits[byte & 0x0fU];
}

template <typename MayStand>
void append_encoded(std::string& out, std::string_view value, MayStand may_stand) {
    for (const char c : value) {
        if (may_stand(c))
            out += c;
        else
            append_escape(out, c);
    }
}

constexpr bool is_unreserved(char c) noexcept {
    return ascii::is_alnum(c) || "-._~"sv.find(c) != npos;
}

constexpr bool stands_in_header(char c) noexcept {
    return ascii::is_graphic(c) && c != '"' && c != '%';
}

constexpr bool is_escape(std::string_view text) noexcept {
    return text.size() == 3 && text[0] == '%' && ascii::is_hex_digit(text[1]) &&
           ascii::is_hex_digit(text[2]);
}

bool ends_in_escape(std::string_view text) noexcept {
    return text.size() >= 3 && is_escape(text.substr(text.size() - 3));
}

// Percent-decoding repeated until nothing changes. Escapes never overlap, so reducing each as soon
// as it is complete gives the same result in one pass.
std::string fully_decoded(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    for (const char c : text) {
        out += c;
        while (ends_in_escape(out)) {
            const std::size_t escape = out.size() - 3;
            out[escape] = static_cast<char>(ascii::hex_value(out[escape + 1]) * 16 +
                                            ascii::hex_value(out[escape + 2]));
            out.resize(escape + 1);
        }
    }
    return out;
}

// ---------------------------------------------------------------------------------------------
// What a value may be in a path

// A reason, or nothing when `text` can only ever be one ordinary segment or part of one.
std::string_view path_fault(std::string_view text) {
    const std::string decoded = fully_decoded(text);
    if (decoded.empty())
        return "a value in the path of the endpoint is empty";
    if (decoded == "." || decoded == "..")
        return "a value in the path of the endpoint makes a dot segment";
    if (decoded.find_first_of("/\\") != npos)
        return "a value in the path of the endpoint holds a slash or backslash";
    return {};
}

// The segment that `position` is in, in a URL whose path has begun before it.
std::string_view segment_around(std::string_view url, std::size_t position) noexcept {
    const std::size_t begin = url.rfind('/', position) + 1;
    return url.substr(begin, std::min(url.find_first_of("/?", begin), url.size()) - begin);
}

// ---------------------------------------------------------------------------------------------
// What an endpoint may be

// Length of "http://" or "https://"; 0 for anything else.
std::size_t scheme_length(std::string_view url) noexcept {
    for (const std::string_view scheme : {"http://"sv, "https://"sv}) {
        if (ascii::starts_with_ignoring_case(url, scheme))
            return scheme.size();
    }
    return 0;
}

// `begin`: where the authority begins.
std::size_t authority_end(std::string_view url, std::size_t begin) noexcept {
    return std::min(url.find_first_of("/?", begin), url.size());
}

bool may_stand_in_url(char c) noexcept {
    return ascii::is_graphic(c) && c != '\\' && c != '#';
}

bool has_stray_percent(std::string_view url) noexcept {
    for (std::size_t at = url.find('%'); at != npos; at = url.find('%', at + 1)) {
        if (!is_escape(url.substr(at, 3)))
            return true;
    }
    return false;
}

bool is_ipv6_character(char c) noexcept {
    return ascii::is_hex_digit(c) || c == ':' || c == '.';
}

bool is_host_name_character(char c) noexcept {
    return ascii::is_alnum(c) || c == '-' || c == '.' || c == '_';
}

// A name, an IPv4 address, or an IPv6 address in brackets.
bool is_host(std::string_view host) noexcept {
    if (!host.starts_with('['))
        return !host.empty() && std::all_of(host.begin(), host.end(), is_host_name_character);
    const std::string_view address = host.substr(1, host.size() - 2);
    return std::all_of(address.begin(), address.end(), is_ipv6_character) &&
           std::count(address.begin(), address.end(), ':') >= 2;
}

// What follows the host: nothing, or a colon and a number.
bool is_port(std::string_view text) noexcept {
    if (text.empty())
        return true;
    if (text.front() != ':')
        return false;
    std::uint16_t port = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, fault] = std::from_chars(text.data() + 1, end, port);
    return fault == std::errc{} && stop == end;
}

std::string_view authority_fault(std::string_view authority) noexcept {
    const std::size_t userinfo_end = authority.find('@');
    if (userinfo_end != npos)
        authority.remove_prefix(userinfo_end + 1);
    const std::size_t host_end = authority.starts_with('[')
                                     ? authority.find(']') + 1 // 0 when there is none
                                     : std::min(authority.find(':'), authority.size());
    if (!is_host(authority.substr(0, host_end)))
        return "must name a host: a name, an IPv4 address, or an IPv6 address in brackets";
    if (!is_port(authority.substr(host_end)))
        return "must have no port or one from 0 to 65535";
    return {};
}

constexpr auto kBracesFault = "must hold braces only as {aggregate_type}, {aggregate_id} and "
                              "{event_type}, in path and query"sv;

// Everything but the placeholders.
std::string_view url_fault(std::string_view url) noexcept {
    static_assert(kMaxUrlBytes == 8000, "the message names it");
    if (url.size() > kMaxUrlBytes)
        return "must not be longer than 8000 bytes";
    if (!std::all_of(url.begin(), url.end(), may_stand_in_url))
        return "must be printable ASCII without space, backslash and fragment";
    const std::size_t authority = scheme_length(url);
    if (authority == 0)
        return "must begin with http:// or https://";
    if (has_stray_percent(url))
        return "must have two hexadecimal digits after every percent sign";
    const std::size_t end = authority_end(url, authority);
    if (url.substr(0, end).find_first_of("{}") != npos)
        return kBracesFault;
    return authority_fault(url.substr(authority, end - authority));
}

} // namespace

// ---------------------------------------------------------------------------------------------

std::string_view Endpoint::placeholder(Field field) noexcept {
    switch (field) {
    case Field::literal:
        break;
    case Field::aggregate_type:
        return "{aggregate_type}";
    case Field::aggregate_id:
        return "{aggregate_id}";
    case Field::event_type:
        return "{event_type}";
    }
    return {};
}

std::string_view Endpoint::value(const Event& event, Field field) noexcept {
    switch (field) {
    case Field::literal:
        break;
    case Field::aggregate_type:
        return event.aggregate_type;
    case Field::aggregate_id:
        return event.aggregate_id;
    case Field::event_type:
        return event.event_type;
    }
    return {};
}

// The placeholder that `text` begins with; literal when there is none.
Endpoint::Field Endpoint::leading_field(std::string_view text) noexcept {
    for (const Field field : {Field::aggregate_type, Field::aggregate_id, Field::event_type}) {
        if (text.starts_with(placeholder(field)))
            return field;
    }
    return Field::literal;
}

// False at a brace that is no placeholder.
bool Endpoint::split(std::string_view url) {
    bool in_path = true;
    while (!url.empty()) {
        const std::size_t length = std::min(url.find_first_of("{}"), url.size());
        const std::string_view literal = url.substr(0, length);
        in_path = in_path && literal.find('?') == npos;
        pieces_.push_back({Field::literal, in_path, std::string(literal)});
        url.remove_prefix(length);
        if (url.empty())
            break;
        const Field field = leading_field(url);
        if (field == Field::literal)
            return false;
        pieces_.push_back({field, in_path, {}});
        url.remove_prefix(placeholder(field).size());
    }
    return true;
}

std::optional<Endpoint> Endpoint::parse(std::string_view text, std::string& error) {
    if (const std::string_view fault = url_fault(text); !fault.empty()) {
        error = fault;
        return std::nullopt;
    }
    Endpoint endpoint;
    if (!endpoint.split(text)) {
        error = kBracesFault;
        return std::nullopt;
    }
    // An endpoint that refuses the most harmless values would refuse every event.
    Event harmless;
    harmless.aggregate_type = harmless.aggregate_id = harmless.event_type = "x";
    if (!endpoint.expand(harmless, error)) {
        error = "must not have an encoded slash or backslash beside a placeholder in the path";
        return std::nullopt;
    }
    return endpoint;
}

// Appends the URL for `event`; a reason, or nothing when it is good.
std::string_view Endpoint::fill(const Event& event, std::string& url) const {
    std::vector<std::size_t> in_path; // where values stand in the path
    for (const Piece& piece : pieces_) {
        const std::string_view text = value(event, piece.field);
        if (piece.field != Field::literal && piece.in_path) {
            if (const std::string_view fault = path_fault(text); !fault.empty())
                return fault;
            in_path.push_back(url.size());
        }
        url += piece.text;
        append_percent_encoded(url, text);
    }
    // Harmless values may still combine, with each other or with literals, into what none is alone.
    for (const std::size_t position : in_path) {
        if (const auto fault = path_fault(segment_around(url, position)); !fault.empty())
            return fault;
    }
    return {};
}

std::optional<std::string> Endpoint::expand(const Event& event, std::string& error) const {
    std::string url;
    if (const std::string_view fault = fill(event, url); !fault.empty()) {
        error = fault;
        return std::nullopt;
    }
    return url;
}

std::string Endpoint::text() const {
    std::string url;
    for (const Piece& piece : pieces_)
        url.append(piece.text).append(placeholder(piece.field));
    return url;
}

std::string Endpoint::redacted() const {
    constexpr std::string_view kHidden = "***";
    std::string url = text();
    if (const std::size_t query = url.find('?'); query != npos)
        url.replace(query + 1, npos, kHidden);
    const std::size_t authority = scheme_length(url);
    const std::string_view host_and_userinfo =
        std::string_view(url).substr(authority, authority_end(url, authority) - authority);
    if (const std::size_t userinfo_end = host_and_userinfo.find('@'); userinfo_end != npos)
        url.replace(authority, userinfo_end, kHidden);
    return url;
}

std::vector<std::string> Endpoint::secrets() const {
    constexpr std::size_t kShortest = 4;
    std::vector<std::string> found;
    const auto add = [&found](std::string_view secret) {
        if (secret.size() >= kShortest)
            found.emplace_back(secret);
    };
    const std::string url = text();
    const std::size_t authority = scheme_length(url);
    std::string_view userinfo =
        std::string_view(url).substr(authority, authority_end(url, authority) - authority);
    userinfo = userinfo.substr(0, userinfo.find('@') == npos ? 0 : userinfo.find('@'));
    add(userinfo.substr(userinfo.find(':') + 1)); // npos + 1 is 0: all of it
    std::string_view query = url;
    query.remove_prefix(std::min(query.size(), query.find('?')));
    while (!query.empty()) {
        query.remove_prefix(1);
        const std::string_view pair = query.substr(0, query.find('&'));
        add(pair.substr(pair.find('=') + 1));
        query.remove_prefix(pair.size());
    }
    return found;
}

void append_percent_encoded(std::string& out, std::string_view value) {
    append_encoded(out, value, is_unreserved);
}

void append_header_encoded(std::string& out, std::string_view value) {
    append_encoded(out, value, stands_in_header);
}

} // namespace outbox::core
