# Builds, installs, checks and shows the extension outbox. PGXS does the building; see `make help`.

EXTENSION = outbox
MODULE_big = outbox
DATA = $(wildcard sql/outbox--*.sql)

SOURCES = $(wildcard src/core/*.cpp src/net/*.cpp src/pg/*.cpp)
OBJS = $(SOURCES:.cpp=.o)

PG_CONFIG ?= pg_config

WARNINGS = -Wall -Wextra -Wshadow -Wno-missing-field-initializers
ifdef WERROR
WARNINGS += -Werror
endif

# Hidden but for what PostgreSQL looks up by name.
PG_CXXFLAGS = -std=c++20 $(WARNINGS) -fvisibility=hidden -MMD -MP \
	'-DPGDLLEXPORT=__attribute__((visibility("default")))'
PG_CPPFLAGS = -Isrc -isystem $(shell $(PG_CONFIG) --includedir-server)
SHLIB_LINK = -lcurl -lstdc++ -Wl,--version-script=src/exports.map

REGRESS = $(sort $(patsubst test/sql/%.sql,%,$(wildcard test/sql/*.sql)))
REGRESS_OPTS = --inputdir=test --load-extension=outbox

EXTRA_CLEAN = build $(SOURCES:.cpp=.d)

# Goals of our own; they need no PGXS and install what is missing. All others are PGXS's.
OUR_GOALS = unit-binary check-unit check demo bench help

ifeq ($(filter $(OUR_GOALS),$(MAKECMDGOALS)),)

# No LLVM bitcode of C++: it would need the exact clang that built the server.
override with_llvm = no
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)
-include $(SOURCES:.cpp=.d)
ifneq ($(findstring clang,$(CXX)),)
# The server's flags are of the compiler that built it.
override CXXFLAGS := $(filter-out -Wimplicit-fallthrough=% -Wcast-function-type,$(CXXFLAGS))
endif

else

UNIT_SOURCES = $(wildcard src/core/*.cpp src/net/*.cpp test/unit/*.cpp)
UNIT_OBJS = $(patsubst %.cpp,build/unit/%.o,$(UNIT_SOURCES))
UNIT_FLAGS = -std=c++20 -O1 -g $(WARNINGS) -Isrc -Itest -MMD -MP

build/unit/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(UNIT_FLAGS) -c $< -o $@

build/unit_tests: $(UNIT_OBJS)
	$(CXX) $(UNIT_FLAGS) $^ -o $@ -lgtest -lgtest_main -lcurl -lpthread

-include $(UNIT_OBJS:.o=.d)

.PHONY: $(OUR_GOALS)

unit-binary: build/unit_tests

# Unit tests of src/core and src/net; no server needed.
check-unit:
	test/run/deps check
	$(MAKE) unit-binary
	build/unit_tests

# All tests. CHECK='unit regress pgtap tap lint' selects groups.
check:
	test/run/deps check
	test/run/install
	test/run/check $(CHECK)

# The story of an event, on a throwaway cluster.
demo:
	test/run/deps demo
	test/run/install
	test/demo/demo

# Rates, latency, memory and the writers' cost, as a table and as JSON. BENCH passes options.
bench:
	test/run/deps bench
	test/run/install
	test/bench/run $(BENCH)

help:
	@echo 'make              builds the extension against pg_config'
	@echo 'make install      installs it there'
	@echo 'make demo         shows it at work on a throwaway cluster'
	@echo 'make check        runs all tests;  make check-unit  those that need no server'
	@echo 'make bench        measures it'

endif
