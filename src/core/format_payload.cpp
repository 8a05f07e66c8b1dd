// Format `payload`: the body is the payload and nothing else; what it belongs to stands in
// outbox-event-* and outbox-aggregate-* headers.
#include <utility>

#include "core/formats.hpp"

namespace outbox::core {

namespace {

class Payload final : public Format {
  public:
    [[nodiscard]] std::string_view name() const noexcept override { return "payload"; }
    [[nodiscard]] FormatLimits limits() const noexcept override { return {.max_events = 1}; }
    [[nodiscard]] BuildResult build(std::span<const Event* const> events,
                                    const Target& target) const override;
};

BuildResult Payload::build(std::span<const Event* const> events, const Target& target) const {
    const Event& event = *events.front();
    std::vector<Header> headers = leading_headers(event);
    append_encoded_header(headers, "outbox-event-id", event.id.text());
    append_encoded_header(headers, "outbox-event-type", event.event_type);
    append_encoded_header(headers, "outbox-aggregate-type", event.aggregate_type);
    append_encoded_header(headers, "outbox-aggregate-id", event.aggregate_id);
    append_encoded_header(headers, "outbox-sequence", sequence_text(event.seq));
    return complete_request(event, target, std::move(headers), event.payload);
}

} // namespace

const Format& payload_format() noexcept {
    static constexpr Payload format{};
    return format;
}

} // namespace outbox::core
