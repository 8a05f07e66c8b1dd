// What the formats have in common: the frame of a request, text forms of numbers and times, and the
// list of formats. Must not know what any one format looks like.
#include "core/format.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "core/ascii.hpp"
#include "core/formats.hpp"
#include "core/header.hpp"
#include "core/verdict.hpp"

namespace outbox::core {

std::vector<Verdict> Format::classify(const Answer& answer, std::size_t n) const {
    return std::vector(n, judge(answer));
}

const Format* find_format(std::string_view name) noexcept {
    for (const Format* format : {&cloudevents_format(), &json_format(), &payload_format()}) {
        if (format->name() == name)
            return format;
    }
    return nullptr;
}

namespace {

bool names(const std::vector<Header>& headers, std::string_view name) {
    return std::ranges::any_of(headers, [name](const Header& header) {
        return ascii::equal_ignoring_case(header.name, name);
    });
}

} // namespace

bool append_event_headers(const Event& event, const std::vector<Header>& fixed,
                          std::vector<Header>& out, std::string& error) {
    if (!event.headers_error.empty()) {
        error = event.headers_error;
        return false;
    }
    for (const Header& header : event.headers) {
        if (const HeaderFault fault = check_event_header(header); fault != HeaderFault::none) {
            error = describe(fault);
            return false;
        }
        if (!names(fixed, header.name))
            out.push_back(header);
    }
    if (event.replay)
        out.push_back({"outbox-replay", "true"});
    return true;
}

void append_json_string(std::string& out, std::string_view text) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    out += '"';
    for (const char c : text) {
        if (ascii::is_control(c)) {
            const auto byte = static_cast<unsigned char>(c);
            out.append("\\u00").append({kDigits[byte >> 4U], kDigits[byte & 0x0fU]});
            continue;
        }
        if (c == '"' || c == '\\')
            out += '\\';
        out += c;
    }
    out += '"';
}

std::string rfc3339(Micros unix_time) {
    using namespace std::chrono;
    const sys_time<microseconds> instant{microseconds{unix_time}};
    const sys_days day = floor<days>(instant);
    const year_month_day date{day};
    const hh_mm_ss<microseconds> time{instant - day};
    std::array<char, 64> text{};
    const int length = std::snprintf(
        text.data(), text.size(), "%04d-%02u-%02uT%02d:%02d:%02d.%06dZ", int{date.year()},
        unsigned{date.month()}, unsigned{date.day()}, static_cast<int>(time.hours().count()),
        static_cast<int>(time.minutes().count()), static_cast<int>(time.seconds().count()),
        static_cast<int>(time.subseconds().count()));
    return {text.data(), static_cast<std::size_t>(length)};
}

std::string sequence_text(std::int64_t seq) {
    std::array<char, 32> text{};
    const int length = std::snprintf(text.data(), text.size(), "%019" PRId64, seq);
    return {text.data(), static_cast<std::size_t>(length)};
}

std::vector<Header> leading_headers(const Event& event) {
    return {{"Content-Type", "application/json"}, {"Idempotency-Key", event.id.text()}};
}

void append_encoded_header(std::vector<Header>& out, std::string_view name,
                           std::string_view value) {
    Header header{std::string(name), {}};
    append_header_encoded(header.value, value);
    out.push_back(std::move(header));
}

BuildResult complete_request(const Event& event, const Target& target, std::vector<Header> headers,
                             std::string body) {
    BuildResult result;
    std::optional<std::string> url = target.endpoint.expand(event, result.error);
    if (!url)
        return result;
    headers.insert(headers.end(), target.fixed_headers.begin(), target.fixed_headers.end());
    if (!append_event_headers(event, target.fixed_headers, headers, result.error))
        return result;
    result.request = {std::move(*url), std::move(headers), std::move(body)};
    result.ok = true;
    return result;
}

} // namespace outbox::core
