// Format `json`: one JSON object with all that is known of the event, for receivers that would
// rather not read headers. The payload is embedded as it is, never parsed.
#include <utility>

#include "core/formats.hpp"

namespace outbox::core {

namespace {

class Json final : public Format {
  public:
    [[nodiscard]] std::string_view name() const noexcept override { return "json"; }
    [[nodiscard]] FormatLimits limits() const noexcept override { return {.max_events = 1}; }
    [[nodiscard]] BuildResult build(std::span<const Event* const> events,
                                    const Target& target) const override;
};

// null when there are none: the column holds null or {}.
void append_headers(std::string& out, const std::vector<Header>& headers) {
    if (headers.empty()) {
        out += "null";
        return;
    }
    char separator = '{';
    for (const Header& header : headers) {
        out += std::exchange(separator, ',');
        append_json_string(out, header.name);
        out += ':';
        append_json_string(out, header.value);
    }
    out += '}';
}

std::string envelope(const Event& event) {
    std::string out;
    out.reserve(event.payload.size() + 512);
    out += R"({"id":)";
    append_json_string(out, event.id.text());
    out += R"(,"aggregate_type":)";
    append_json_string(out, event.aggregate_type);
    out += R"(,"aggregate_id":)";
    append_json_string(out, event.aggregate_id);
    out += R"(,"event_type":)";
    append_json_string(out, event.event_type);
    out.append(R"(,"seq":)").append(std::to_string(event.seq));
    out += R"(,"created_at":)";
    if (event.created_at)
        append_json_string(out, rfc3339(*event.created_at));
    else
        out += "null";
    out.append(R"(,"payload":)").append(event.payload);
    out += R"(,"headers":)";
    append_headers(out, event.headers);
    out += '}';
    return out;
}

BuildResult Json::build(std::span<const Event* const> events, const Target& target) const {
    const Event& event = *events.front();
    return complete_request(event, target, leading_headers(event), envelope(event));
}

} // namespace

const Format& json_format() noexcept {
    static constexpr Json format{};
    return format;
}

} // namespace outbox::core
