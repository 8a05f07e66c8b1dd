// What the programs of the bench share: options, clocks, handles that free themselves, and the
// event every measurement sends (about 200 bytes of JSON, spread over --aggregates entities).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace bench {

[[noreturn]] inline void die(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

// --name value, and --flag for the names listed in flags.
class Options {
  public:
    Options(int argc, char** argv, std::string_view flags = "") {
        for (int i = 1; i < argc; ++i) {
            const std::string_view name = argv[i];
            if (!name.starts_with("--"))
                die("unexpected argument: " + std::string(name));
            const bool is_flag = flags.find(name) != std::string_view::npos;
            if (!is_flag && i + 1 >= argc)
                die("a value is missing after " + std::string(name));
            values_[std::string(name.substr(2))] = is_flag ? "1" : argv[++i];
        }
    }
    bool has(const std::string& name) const { return values_.contains(name); }
    const std::string& text(const std::string& name) const {
        const auto found = values_.find(name);
        if (found == values_.end())
            die("missing option --" + name);
        return found->second;
    }
    long number(const std::string& name, long otherwise) const {
        const auto found = values_.find(name);
        if (found == values_.end())
            return otherwise;
        char* end = nullptr;
        const long value = std::strtol(found->second.c_str(), &end, 10);
        if (end == found->second.c_str() || *end != '\0' || value <= 0)
            die("--" + name + " must be a positive number");
        return value;
    }

  private:
    std::map<std::string, std::string> values_;
};

inline double steady_seconds() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

inline std::int64_t realtime_us() {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1000000 + now.tv_nsec / 1000;
}

// std::unique_ptr for a C handle: Handle<PGconn, PQfinish>.
template <auto Free>
struct Freed {
    template <typename T>
    void operator()(T* handle) const {
        Free(handle);
    }
};
template <typename T, auto Free>
using Handle = std::unique_ptr<T, Freed<Free>>;

// printf into a std::string; the formats here are short.
template <typename... Args>
std::string format(const char* pattern, Args... args) {
    char text[1024];
    std::snprintf(text, sizeof text, pattern, args...);
    return text;
}

inline std::string aggregate_id(long n, long aggregates) {
    return format("order-%05ld", n % aggregates);
}

// The same members, in the order jsonb prints them, as sql/fill.sql inserts.
inline std::string payload(long n) {
    return format(R"({"note": "leave at the door, ring twice", "items": [{"sku": "sku-%06ld", )"
                  R"("price": 1999, "quantity": 2}], "total": 3998, "currency": "EUR", )"
                  R"("customer": "customer-%06ld", "order_id": "order-%08ld", "placed_by": "web"})",
                  n % 5000, n % 7000, n);
}

} // namespace bench
