// See settings.hpp. Every check hook says what is allowed, and never repeats a value that may hold
// a secret.
#include <optional>
#include <string>

#include "core/header.hpp"
#include "core/url.hpp"
#include "pg/settings.hpp"

#include "pg/guard.hpp"

namespace outbox::pg {

Settings settings;

namespace {

const config_enum_entry kFormats[] = {{"cloudevents", kFormatCloudevents, false},
                                      {"json", kFormatJson, false},
                                      {"payload", kFormatPayload, false},
                                      {nullptr, 0, false}};

const config_enum_entry kOrderings[] = {
    {"aggregate", kOrderingAggregate, false}, {"none", kOrderingNone, false}, {nullptr, 0, false}};

// --- endpoint ---

// Why the text is no endpoint, into `why`; nothing of PostgreSQL is called here.
bool endpoint_is_valid(const char* text, char* why, std::size_t size) noexcept {
    bool valid = false;
    const bool ran = guarded([&] {
        std::string error;
        valid = core::Endpoint::parse(text, error).has_value();
        strlcpy(why, error.c_str(), size);
    });
    if (!ran) {
        strlcpy(why, guard_text(), size);
    }
    return valid;
}

bool check_endpoint(char** value, void** /*extra*/, GucSource /*source*/) {
    char why[256] = "";
    if (**value == '\0' || endpoint_is_valid(*value, why, sizeof(why))) {
        return true;
    }
    GUC_check_errmsg("invalid value for parameter \"%s\"",
                     "outbox.endpoint"); // it may hold a secret
    GUC_check_errdetail("The URL %s.", why);
    GUC_check_errhint("Use an http:// or https:// URL; {aggregate_type}, {aggregate_id} and "
                      "{event_type} are allowed in its path and query. An empty string makes "
                      "events wait.");
    return false;
}

// --- http_headers ---

// The state of the JSON walk: an object of strings, nothing nested.
struct HeadersWalk {
    HeaderFound found;
    void* context;
    char* name;
    const char* why;
    int depth;
};

void not_an_object(void* state) {
    auto* walk = static_cast<HeadersWalk*>(state);
    if (walk->why == nullptr) {
        walk->why = "The value is not a JSON object of strings.";
    }
}

void object_start(void* state) {
    auto* walk = static_cast<HeadersWalk*>(state);
    if (walk->depth++ > 0) {
        not_an_object(state);
    }
}

void object_end(void* state) {
    --static_cast<HeadersWalk*>(state)->depth;
}

void field_start(void* state, char* name, bool /*isnull*/) {
    static_cast<HeadersWalk*>(state)->name = name;
}

void scalar(void* state, char* token, JsonTokenType type) {
    auto* walk = static_cast<HeadersWalk*>(state);
    if (walk->depth != 1 || type != JSON_TOKEN_STRING) {
        not_an_object(state);
    } else if (walk->why == nullptr) {
        walk->found(walk->context, walk->name, token);
    }
}

core::HeaderFault fixed_header_fault(const char* name, const char* value) noexcept {
    core::HeaderFault fault = core::HeaderFault::bad_value;
    (void)guarded([&] { fault = core::check_fixed_header({name, value}); });
    return fault;
}

void find_fault(void* context, const char* name, const char* value) {
    auto* fault = static_cast<core::HeaderFault*>(context);
    if (*fault == core::HeaderFault::none) {
        *fault = fixed_header_fault(name, value);
    }
}

bool check_http_headers(char** value, void** /*extra*/, GucSource /*source*/) {
    core::HeaderFault fault = core::HeaderFault::none;
    const char* why = nullptr;
    if (!read_headers_setting(*value, &find_fault, &fault, &why)) {
        GUC_check_errdetail("%s", why);
    } else if (fault != core::HeaderFault::none) {
        const std::string_view text = core::describe(fault);
        GUC_check_errdetail("One of the headers cannot be sent: %.*s.",
                            static_cast<int>(text.size()), text.data());
    } else {
        return true;
    }
    GUC_check_errmsg("invalid value for parameter \"%s\"",
                     "outbox.http_headers"); // it may hold secrets
    GUC_check_errhint(
        "Use a JSON object of strings such as {\"Authorization\": \"Bearer ...\"}. Names "
        "are HTTP tokens, values hold no control characters; names that the relay or HTTP sets "
        "itself (Host, Content-Type, ce-*, outbox-*, ...) are reserved.");
    return false;
}

// --- the others ---

bool is_list_of_databases(List* names) {
    ListCell* cell = nullptr;
    foreach (cell, names) {
        if (std::strcmp(static_cast<char*>(lfirst(cell)), "*") == 0) {
            return false;
        }
    }
    return true;
}

bool check_databases(char** value, void** /*extra*/, GucSource /*source*/) {
    if (std::strcmp(*value, "*") == 0) {
        return true;
    }
    char* copy = pstrdup(*value);
    List* names = NIL;
    const bool valid = SplitIdentifierString(copy, ',', &names) && is_list_of_databases(names);
    if (!valid) {
        GUC_check_errdetail("The value is not a list of database names.");
        GUC_check_errhint("Use '*' alone for all databases that have the extension, a "
                          "comma-separated list of names (in double quotes where they hold upper "
                          "case or special characters), or '' for none.");
    }
    list_free(names);
    pfree(copy);
    return valid;
}

bool has_control_character(const char* text) {
    for (; *text != '\0'; ++text) {
        const auto c = static_cast<unsigned char>(*text);
        if (c < 0x20 || c == 0x7f) {
            return true;
        }
    }
    return false;
}

bool check_source(char** value, void** /*extra*/, GucSource /*source*/) {
    if (has_control_character(*value) || std::strchr(*value, ' ') != nullptr) {
        GUC_check_errdetail("The value holds a space or a control character.");
        GUC_check_errhint("Use a URI reference such as /orders or urn:example:orders, or '' for "
                          "urn:outbox:SYSTEMID:DATABASE.");
        return false;
    }
    return true;
}

bool check_ca_file(char** value, void** /*extra*/, GucSource /*source*/) {
    if (**value != '\0' && (**value != '/' || has_control_character(*value))) {
        GUC_check_errdetail("The value is not an absolute path without control characters.");
        GUC_check_errhint("Use the absolute path of a PEM file that the server can read, or '' for "
                          "the system's certificates.");
        return false;
    }
    return true;
}

bool check_retention(int* value, void** /*extra*/, GucSource /*source*/) {
    return *value >= -1;
}

// --- definition ---

void define_string(const char* name, const char* description, char** variable, const char* preset,
                   int flags, GucStringCheckHook check) {
    DefineCustomStringVariable(name, description, nullptr, variable, preset, PGC_SIGHUP, flags,
                               check, nullptr, nullptr);
}

void define_int(const char* name, const char* description, int* variable, int preset, int least,
                int most, int flags, GucIntCheckHook check = nullptr) {
    DefineCustomIntVariable(name, description, nullptr, variable, preset, least, most, PGC_SIGHUP,
                            flags, check, nullptr, nullptr);
}

void define_where_to() {
    define_string("outbox.databases",
                  "Databases that get a relay: '*' for all that have the extension, a list, or '' "
                  "for none.",
                  &settings.databases, "*", GUC_LIST_INPUT, check_databases);
    define_string("outbox.endpoint", "URL that events are sent to; empty: events wait.",
                  &settings.endpoint, "", GUC_SUPERUSER_ONLY, check_endpoint);
    DefineCustomEnumVariable("outbox.format", "What a request looks like.", nullptr,
                             &settings.format, kFormatCloudevents, kFormats, PGC_SIGHUP, 0, nullptr,
                             nullptr, nullptr);
    define_string("outbox.http_headers", "Headers of every request, a JSON object of strings.",
                  &settings.http_headers, "", GUC_SUPERUSER_ONLY, check_http_headers);
    define_string("outbox.source", "CloudEvents source; empty: urn:outbox:SYSTEMID:DATABASE.",
                  &settings.source, "", 0, check_source);
    define_string("outbox.ca_file", "PEM file of trusted certificates; empty: the system's.",
                  &settings.ca_file, "", 0, check_ca_file);
}

void define_how_much() {
    define_int("outbox.workers", "Workers per database.", &settings.workers, 1, 1, 64, 0);
    define_int("outbox.batch_size", "Rows claimed at once.", &settings.batch_size, 200, 1, 10000,
               0);
    define_int("outbox.max_in_flight", "Concurrent requests per worker.", &settings.max_in_flight,
               128, 1, 10000, 0);
    define_int("outbox.max_in_flight_bytes", "Payload held per worker; a larger event goes alone.",
               &settings.max_in_flight_kb, 64 * 1024, 64, MAX_KILOBYTES, GUC_UNIT_KB);
}

void define_when() {
    define_int("outbox.poll_interval",
               "Time between safety polls; commits wake the relay by themselves.",
               &settings.poll_interval_ms, 5000, 100, 3600 * 1000, GUC_UNIT_MS);
    define_int("outbox.connect_timeout", "Longest time to connect, name lookup and TLS included.",
               &settings.connect_timeout_ms, 5000, 1, 3600 * 1000, GUC_UNIT_MS);
    define_int("outbox.request_timeout", "Longest time for a whole request.",
               &settings.request_timeout_ms, 15000, 1, 3600 * 1000, GUC_UNIT_MS);
    define_int("outbox.shutdown_timeout", "Grace for requests in flight at shutdown.",
               &settings.shutdown_timeout_ms, 3000, 0, 3600 * 1000, GUC_UNIT_MS);
    define_int("outbox.retention",
               "Age at which delivered events are deleted; 0: on delivery, -1: never.",
               &settings.retention_s, 24 * 3600, -1, INT_MAX, GUC_UNIT_S, check_retention);
}

void define_failures() {
    define_int("outbox.max_attempts", "Counted attempts after which an event is a dead letter.",
               &settings.max_attempts, 10, 1, INT_MAX, 0);
    define_int("outbox.retry_base", "Delay before the first retry; it doubles from there.",
               &settings.retry_base_ms, 1000, 1, 24 * 3600 * 1000, GUC_UNIT_MS);
    define_int("outbox.retry_cap", "Longest delay between retries.", &settings.retry_cap_ms,
               15 * 60 * 1000, 1, 7 * 24 * 3600 * 1000, GUC_UNIT_MS);
    DefineCustomEnumVariable("outbox.ordering",
                             "aggregate: events of an aggregate one at a time, in order; none: as "
                             "they come.",
                             nullptr, &settings.ordering, kOrderingAggregate, kOrderings,
                             PGC_SIGHUP, 0, nullptr, nullptr, nullptr);
    DefineCustomBoolVariable(
        "outbox.notify", "Also sends NOTIFY outbox_event with the event's id, one a row.",
        "Costs writers dearly.", &settings.notify, false, PGC_SIGHUP, 0, nullptr, nullptr, nullptr);
}

} // namespace

void define_settings() {
    define_where_to();
    define_how_much();
    define_when();
    define_failures();
    MarkGUCPrefixReserved("outbox");
}

const char* format_name() {
    return kFormats[settings.format].name;
}

bool database_wanted(const char* name, bool is_template) {
    if (std::strcmp(settings.databases, "*") == 0) {
        return !is_template;
    }
    char* copy = pstrdup(settings.databases);
    List* names = NIL;
    bool wanted = false;
    if (SplitIdentifierString(copy, ',', &names)) {
        ListCell* cell = nullptr;
        foreach (cell, names) {
            wanted = wanted || std::strcmp(static_cast<char*>(lfirst(cell)), name) == 0;
        }
    }
    list_free(names);
    pfree(copy);
    return wanted;
}

bool read_headers_setting(const char* text, HeaderFound found, void* context, const char** why) {
    if (text == nullptr || *text == '\0') {
        return true;
    }
    HeadersWalk walk = {found, context, nullptr, nullptr, 0};
    JsonSemAction actions = {};
    actions.semstate = &walk;
    actions.object_start = object_start;
    actions.object_end = object_end;
    actions.array_start = not_an_object;
    actions.object_field_start = field_start;
    actions.scalar = scalar;
    JsonLexContext* lexer = makeJsonLexContextCstringLen(
        const_cast<char*>(text), static_cast<int>(std::strlen(text)), PG_UTF8, true);
    if (pg_parse_json(lexer, &actions) != JSON_SUCCESS) {
        *why = "The value is not valid JSON.";
        return false;
    }
    *why = walk.why;
    return walk.why == nullptr;
}

} // namespace outbox::pg
