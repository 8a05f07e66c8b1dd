// Format `cloudevents`: CloudEvents 1.0, HTTP binding in binary mode. The attributes travel as ce-*
// headers, the payload is the body, byte for byte.
#include <utility>

#include "core/formats.hpp"

namespace outbox::core {

namespace {

class CloudEvents final : public Format {
  public:
    [[nodiscard]] std::string_view name() const noexcept override { return "cloudevents"; }
    [[nodiscard]] FormatLimits limits() const noexcept override { return {.max_events = 1}; }
    [[nodiscard]] BuildResult build(std::span<const Event* const> events,
                                    const Target& target) const override;
};

BuildResult CloudEvents::build(std::span<const Event* const> events, const Target& target) const {
    const Event& event = *events.front();
    std::vector<Header> headers = leading_headers(event);
    append_encoded_header(headers, "ce-specversion", "1.0");
    append_encoded_header(headers, "ce-id", event.id.text());
    append_encoded_header(headers, "ce-source", target.source);
    append_encoded_header(headers, "ce-type", event.event_type);
    append_encoded_header(headers, "ce-subject", event.aggregate_type + '/' + event.aggregate_id);
    if (event.created_at)
        append_encoded_header(headers, "ce-time", rfc3339(*event.created_at));
    append_encoded_header(headers, "ce-partitionkey", event.aggregate_id);
    append_encoded_header(headers, "ce-sequence", sequence_text(event.seq));
    return complete_request(event, target, std::move(headers), event.payload);
}

} // namespace

const Format& cloudevents_format() noexcept {
    static constexpr CloudEvents format{};
    return format;
}

} // namespace outbox::core
