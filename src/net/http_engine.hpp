// Sends many HTTP requests at once with libcurl's multi interface, driven by an epoll descriptor of
// its own that a caller can nest in any wait. Knows requests and answers, not events, retries or
// order. Never blocks: names are resolved in libcurl's threads. One thread; no signal handlers;
// libcurl's global state is the caller's.
#pragma once

#ifdef POSTGRES_H
#error "net must not see postgres.h"
#endif

#include <memory>
#include <vector>

#include "core/types.hpp"

namespace outbox::net {

struct EngineOptions {
    core::Micros connect_timeout = 5 * core::kSecond;
    core::Micros request_timeout = 15 * core::kSecond; // the whole request, connecting included
    std::string ca_file;                               // PEM; empty: the system's
    std::size_t max_connections = 128;                 // kept open, used or idle
};

struct Finished {
    core::Uuid id;
    core::Answer answer;
};

class HttpEngine {
  public:
    // Null, and `error` set, when libcurl or the kernel gives no handle.
    [[nodiscard]] static std::unique_ptr<HttpEngine> create(const EngineOptions& options,
                                                            std::string& error);
    ~HttpEngine();
    HttpEngine(const HttpEngine&) = delete;
    HttpEngine& operator=(const HttpEngine&) = delete;

    // In force for requests submitted from now on.
    void set_options(const EngineOptions& options);

    // Readable when step() has something to do.
    [[nodiscard]] int wait_fd() const noexcept;
    // Milliseconds until step() is due without that; -1: never, 0: now.
    [[nodiscard]] long timeout_ms() const noexcept;

    // Starts a POST. The id comes back with the answer. A request that libcurl refuses finishes as
    // not sent.
    void submit(const core::Uuid& id, core::Request&& request);
    // Moves all requests on as far as they go without waiting.
    void step();
    // The requests that ended since the last call.
    [[nodiscard]] std::vector<Finished> take_finished();

    [[nodiscard]] std::size_t running() const noexcept;

  private:
    struct Impl;
    explicit HttpEngine(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace outbox::net
