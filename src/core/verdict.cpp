// From an answer to its meaning and its words. Must not let a byte of the receiver's answer through
// that PostgreSQL cannot store or that could break a log line.
#include "core/verdict.hpp"

#include "core/ascii.hpp"
#include "core/retry.hpp"

namespace outbox::core {

namespace {

constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

constexpr unsigned char byte_at(std::string_view text, std::size_t i) noexcept {
    return static_cast<unsigned char>(text[i]);
}

// What the lead byte of a UTF-8 sequence says about the bytes after it (Unicode, table 3-7).
struct Lead {
    std::size_t following = 0;
    unsigned char second_min = 0x80;
    unsigned char second_max = 0xBF;
    bool valid = true;
};

constexpr Lead lead_of(unsigned char byte) noexcept {
    if (byte < 0x80)
        return {.following = 0};
    if (byte >= 0xC2 && byte <= 0xDF)
        return {.following = 1};
    if (byte >= 0xE0 && byte <= 0xEF) // no overlong forms, no surrogates
        return {.following = 2,
                .second_min = static_cast<unsigned char>(byte == 0xE0 ? 0xA0 : 0x80),
                .second_max = static_cast<unsigned char>(byte == 0xED ? 0x9F : 0xBF)};
    if (byte >= 0xF0 && byte <= 0xF4) // no overlong forms, nothing beyond U+10FFFF
        return {.following = 3,
                .second_min = static_cast<unsigned char>(byte == 0xF0 ? 0x90 : 0x80),
                .second_max = static_cast<unsigned char>(byte == 0xF4 ? 0x8F : 0xBF)};
    return {.valid = false};
}

struct Sequence {
    std::size_t length = 1;
    bool valid = false;
};

// The character that non-empty `text` begins with, or the longest part of one.
constexpr Sequence first_sequence(std::string_view text) noexcept {
    const Lead lead = lead_of(byte_at(text, 0));
    if (!lead.valid)
        return {};
    unsigned char min = lead.second_min;
    unsigned char max = lead.second_max;
    for (std::size_t i = 1; i <= lead.following; ++i) {
        if (i >= text.size() || byte_at(text, i) < min || byte_at(text, i) > max)
            return {.length = i, .valid = false};
        min = 0x80;
        max = 0xBF;
    }
    return {.length = lead.following + 1, .valid = true};
}

// C0, DEL and C1.
constexpr bool is_control_character(std::string_view character) noexcept {
    return ascii::is_control(character[0]) ||
           (byte_at(character, 0) == 0xC2 && byte_at(character, 1) < 0xA0);
}

std::string_view without_outer_spaces(std::string_view text) noexcept {
    const std::size_t first = text.find_first_not_of(' ');
    if (first == std::string_view::npos)
        return {};
    return text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

constexpr bool is_success(int status) noexcept {
    return status >= 200 && status <= 299;
}

// Codes by which a receiver or a gateway before it says "not now" about everything.
constexpr bool is_lane_status(int status) noexcept {
    return status == 429 || status == 502 || status == 503 || status == 504;
}

Outcome outcome_of(const Answer& answer) noexcept {
    switch (answer.transport) {
    case Transport::complete:
        break;
    case Transport::not_sent:
        return Outcome::lane_failure;
    case Transport::interrupted:
        return Outcome::event_failure;
    case Transport::aborted:
        return Outcome::aborted;
    }
    if (is_success(answer.status))
        return Outcome::delivered;
    return is_lane_status(answer.status) ? Outcome::lane_failure : Outcome::event_failure;
}

std::string words_of_status(const Answer& answer) {
    std::string words = "status " + std::to_string(answer.status);
    if (answer.status >= 300 && answer.status <= 399)
        words += " (redirects are never followed)";
    constexpr std::string_view kSeparator = ": ";
    const std::string body =
        printable(answer.body, kMaxErrorBytes - words.size() - kSeparator.size());
    const std::string_view detail = without_outer_spaces(body);
    if (!detail.empty())
        words.append(kSeparator).append(detail);
    return words;
}

std::string words_of(const Answer& answer) {
    if (answer.transport == Transport::complete)
        return words_of_status(answer);
    return printable(answer.error.empty() ? "no answer" : answer.error, kMaxErrorBytes);
}

} // namespace

std::string printable(std::string_view bytes, std::size_t limit) {
    std::string out;
    bool after_control = false;
    while (!bytes.empty()) {
        const Sequence sequence = first_sequence(bytes);
        std::string_view character = bytes.substr(0, sequence.length);
        bytes.remove_prefix(sequence.length);
        const bool control = sequence.valid && is_control_character(character);
        if (control && after_control)
            continue;
        after_control = control;
        if (control)
            character = " ";
        else if (!sequence.valid)
            character = kReplacementCharacter;
        if (out.size() + character.size() > limit)
            break;
        out += character;
    }
    return out;
}

Verdict judge(const Answer& answer) {
    Verdict verdict{.outcome = outcome_of(answer), .retry_after = {}, .error = {}};
    if (verdict.outcome == Outcome::delivered)
        return verdict;
    verdict.error = words_of(answer);
    if (verdict.outcome != Outcome::aborted && answer.retry_after)
        verdict.retry_after = cap_retry_after(*answer.retry_after);
    return verdict;
}

Verdict unbuildable(std::string_view reason) {
    return {.outcome = Outcome::unbuildable,
            .retry_after = {},
            .error = printable(reason, kMaxErrorBytes)};
}

void redact(std::string& text, const std::vector<std::string>& secrets) {
    constexpr std::string_view kStars = "***";
    for (const std::string& secret : secrets) {
        if (secret.empty())
            continue;
        for (std::size_t at = text.find(secret); at != std::string::npos;
             at = text.find(secret, at + kStars.size()))
            text.replace(at, secret.size(), kStars);
    }
}

} // namespace outbox::core
