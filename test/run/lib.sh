# What test/run/check and test/demo/demo share: a work directory, an unprivileged user to run a server as,
# a throwaway cluster in it, and a clean-up that leaves nothing behind.
# Sourced, never run. Knows nothing of what is tested or shown.
# shellcheck shell=bash
set -euo pipefail

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Sets PG_BIN (programs), PG_LIB (where outbox.so goes), PG_SHARE and PG_XS (the server's build and test tools).
find_postgres() {
    local pg_config=${PG_CONFIG:-pg_config} variable
    command -v "$pg_config" >/dev/null || die "there is no $pg_config: run test/run/deps, or name one in PG_CONFIG"
    PG_BIN=$("$pg_config" --bindir)
    PG_LIB=$("$pg_config" --pkglibdir)
    PG_SHARE=$("$pg_config" --sharedir)
    PG_XS=$("$pg_config" --pgxs)
    PG_XS=${PG_XS%/src/makefiles/pgxs.mk}
    [ -x "$PG_BIN/initdb" ] || die "there is no server in $PG_BIN: run test/run/deps demo"
    # What the caller's environment says about servers must not lead anywhere else.
    for variable in "${!PG@}"; do
        case $variable in
        PG_*) ;;
        *) unset "$variable" ;;
        esac
    done
    unset LC_ALL LANGUAGE
    export LANG=C.UTF-8
}

# Stops unless the extension is installed, and is the one built in this directory if one has been built.
require_installed_extension() {
    local built installed
    if ! [ -e "$PG_SHARE/extension/outbox.control" ] || ! [ -e "$PG_LIB/outbox.so" ]; then
        die "outbox is not installed in $PG_SHARE and $PG_LIB: run make install"
    fi
    for built in outbox.so outbox.control sql/outbox--*.sql; do
        [ -e "$built" ] || continue
        case $built in
        *.so) installed=$PG_LIB/$built ;;
        *) installed=$PG_SHARE/extension/${built##*/} ;;
        esac
        cmp -s "$built" "$installed" || die "$installed is not the $built of this directory: run make install"
    done
}

# Sets RUN_AS: PostgreSQL refuses to run as root, so root steps down to a user without rights.
choose_user() {
    RUN_AS=$(id -un)
    [ "$(id -u)" = 0 ] || return 0
    RUN_AS=${OUTBOX_TEST_USER:-postgres}
    id -u "$RUN_AS" >/dev/null 2>&1 || RUN_AS=nobody
}

# Runs a command in $WORK as that user.
# SIGINT is set back to its default, since bash has what it starts in the background ignore it.
as_user() (
    cd "$WORK" || exit 1
    export HOME=$WORK TMPDIR=$WORK/tmp USER=$RUN_AS LOGNAME=$RUN_AS
    if [ "$(id -u)" = 0 ]; then
        exec setpriv --reuid="$RUN_AS" --regid="$(id -g "$RUN_AS")" --init-groups \
            env --default-signal=INT,QUIT "$@"
    fi
    exec env --default-signal=INT,QUIT "$@"
)

# Sets WORK: a directory of that user, short enough for socket paths, gone when the script ends.
# OUTBOX_KEEP=1 keeps it, for a look at logs and data afterwards.
make_work_dir() {
    choose_user
    WORK=$(mktemp -d "/tmp/$1.XXXXXX")
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    mkdir "$WORK/tmp"
    own "$WORK"
}

# Gives files to that user, where there is a difference.
own() {
    if [ "$(id -u)" = 0 ]; then chown -R "$RUN_AS:" "$@"; fi
}

clean_up() {
    local status=$?
    trap '' INT TERM HUP
    stop_clusters
    end_leftovers
    if [ -n "${OUTBOX_KEEP:-}" ]; then
        echo "kept: $WORK" >&2
    else
        rm -rf "$WORK"
    fi
    return "$status"
}

# start_cluster NAME < settings: a fresh cluster in $WORK/NAME, reached through a socket there and by no port.
start_cluster() {
    local dir=$WORK/$1
    as_user mkdir -p "$dir"
    as_user "$PG_BIN/initdb" -D "$dir/data" -U postgres -A trust --encoding=UTF8 --no-locale --no-sync \
        >"$dir.initdb.log" 2>&1 || { cat "$dir.initdb.log" >&2 && die "initdb failed"; }
    {
        printf '%s\n' "listen_addresses = ''" "unix_socket_directories = '$dir'" "log_line_prefix = '%m [%p] %b '"
        cat
    } | as_user tee -a "$dir/data/postgresql.conf" >/dev/null
    if ! as_user "$PG_BIN/pg_ctl" -D "$dir/data" -l "$dir/server.log" -w -t 60 start >/dev/null 2>&1 </dev/null; then
        tail -n 40 "$dir/server.log" >&2
        die "the cluster $1 did not start"
    fi
}

# Shuts down at once every cluster under $WORK, those that tests left running included.
stop_clusters() {
    local pid_file
    while IFS= read -r pid_file; do
        as_user "$PG_BIN/pg_ctl" -D "${pid_file%/*}" -m immediate -t 20 stop >/dev/null 2>&1 || true
    done < <(find "$WORK" -name postmaster.pid 2>/dev/null)
}

# Ends what still runs with a working directory under $WORK: receivers, web servers, programs cut off by a deadline.
end_leftovers() {
    local signal pids
    for signal in TERM KILL; do
        pids=$(leftovers)
        [ -n "$pids" ] || return 0
        # shellcheck disable=SC2086 # a list of numbers
        kill -s "$signal" $pids 2>/dev/null || true
        wait_until 3 no_leftovers || true
    done
}

leftovers() {
    find /proc/[0-9]*/cwd -maxdepth 0 \( -lname "$WORK" -o -lname "$WORK/*" \) -printf '%h\n' 2>/dev/null |
        sed 's,^/proc/,,' || true
}

no_leftovers() {
    [ -z "$(leftovers)" ]
}

# wait_until SECONDS COMMAND...: tries the command until it succeeds; fails when the time is over.
wait_until() {
    local deadline=$(($(now_us) + $1 * 1000000))
    shift
    until "$@"; do
        [ "$(now_us)" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

now_us() {
    echo "${EPOCHREALTIME/[.,]/}"
}
