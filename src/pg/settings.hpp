// The outbox.* settings (DESIGN 1.3): their definition, their checks, and their values as C
// variables. What they mean is decided elsewhere.
#pragma once

#include "pg/prelude.hpp"

namespace outbox::pg {

enum FormatSetting : int { kFormatCloudevents, kFormatJson, kFormatPayload };
enum OrderingSetting : int { kOrderingAggregate, kOrderingNone };

struct Settings {
    char* databases;
    char* endpoint;
    int format;
    char* http_headers;
    char* source;
    int workers;
    int batch_size;
    int max_in_flight;
    int max_in_flight_kb;
    int poll_interval_ms;
    int connect_timeout_ms;
    int request_timeout_ms;
    int max_attempts;
    int retry_base_ms;
    int retry_cap_ms;
    int ordering;
    int retention_s; // -1: kept
    bool notify;
    char* ca_file;
    int shutdown_timeout_ms;
};

extern Settings settings;

// Defines all settings; from _PG_init.
void define_settings();

// The name that core::find_format() knows.
const char* format_name();

// Whether outbox.databases wants a relay in this database: '*', or a list that names it. Template
// databases only when named.
bool database_wanted(const char* name, bool is_template);

// Calls `found` for each member of a JSON object of strings. False, and *why set to a constant
// sentence fragment, when it is something else. Does not raise. `text` is UTF-8; null or empty is
// an empty object.
typedef void (*HeaderFound)(void* context, const char* name, const char* value);
bool read_headers_setting(const char* text, HeaderFound found, void* context, const char** why);

} // namespace outbox::pg
