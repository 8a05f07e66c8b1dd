# What the log says of failures: enough to find the event, never what somebody else made up, never a secret, and not a
# line for each when everything fails.

use strict;
use warnings;

use PostgreSQL::Test::Utils qw(slurp_file);
use Test::More;

use OutboxTest;

my $receiver = start_receiver();

# Secrets are there from the start: the server itself logs what a reload changes.
my %secret = (password => 's3cr3t-passw0rd', token => 's3cr3t-t0ken', query => 's3cr3t-query', user => 's3cr3t-user');
my $endpoint = "http://$secret{user}:$secret{password}\@" . $receiver->host . "/hook/{event_type}?key=$secret{query}";
my $node     = new_node(
    'main',
    fast     => 1,
    endpoint => $endpoint,
    conf     => {
        'log_min_messages'        => 'debug5',
        'log_error_verbosity'     => 'verbose',
        'debug_pretty_print'      => 'off',
        'outbox.http_headers'     => qq({"Authorization": "Bearer $secret{token}"}),
        'outbox.retry_base'       => '2h',
        'outbox.retry_cap'        => '2h',
        'outbox.request_timeout'  => '1s',
        'outbox.connect_timeout'  => '1s',
        'outbox.max_attempts'     => 3,
    });
create_extension($node);
wait_workers($node, 1);

sub sql { my ($query, $db) = @_; return $node->safe_psql($db // 'postgres', $query) }

my $aggregates = 0;

sub insert
{
    my (%column) = @_;
    %column = (aggregate_type => 'order', aggregate_id => 'a' . ++$aggregates, event_type => 'e', %column);
    my @names = sort keys %column;
    my @values = map { my $v = $_; utf8::encode($v) if $v =~ /[^\x00-\xff]/; 'E' . q(') . $v =~ s/([\\'])/\\$1/gr . q(') } @column{@names};
    return sql(sprintf q(INSERT INTO outbox_events (%s, payload) VALUES (%s, '{}') RETURNING id), join(', ', @names), join(', ', @values));
}

my $pair = qr/([a-z_]+)=(?|"((?:[^"\\]|\\.)*)"|([^\s"]+))/;

# The lines about failed deliveries of that event, each as the pairs it consists of; a line that does not consist of
# pairs has the key 'odd'.
sub failures
{
    my ($id, $offset) = @_;
    my @found;
    for my $line (split /\n/, log_since($node, $offset))
    {
        next if $line !~ /\bevent_id=\Q$id\E/;
        next if $line !~ /outbox: (delivery failed|event is dead)(.*)/;
        my ($what, $rest) = ($1, $2);
        my %pairs = (what => $what);
        $pairs{$1} = $2 while $rest =~ s/\A $pair//;
        $pairs{odd} = $rest if length $rest;
        push @found, \%pairs;
    }
    return @found;
}

sub wait_failure
{
    my ($id) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_for('a line about it', sub { (failures($id))[-1] });
}

sub wait_failed
{
    my (@ids) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_sql($node, 'postgres',
        'SELECT count(*) FROM outbox_events WHERE last_error IS NOT NULL AND id IN (' . join(', ', map { "'$_'" } @ids) . ')', scalar @ids,
        desc => 'it has failed');
}

# The server's prefix, as in log_line_prefix of the test; what does not have it goes on from the line before, and
# begins with a tab then.
my $prefix = qr/\A[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+ \w+ \[[0-9]+\] /;

# ---------------------------------------------------------------------------------------------------------
# What a line says

subtest 'a failure can be found in the log' => sub {
    $receiver->rule(path => 'order.created', status => 500, body => 'no such "thing"');
    my $id = insert(aggregate_type => 'order', aggregate_id => '42', event_type => 'order.created');
    is_deeply(
        wait_failure($id),
        {
            what => 'delivery failed', event_id => $id, event_type => 'order.created', aggregate_type => 'order', aggregate_id => '42',
            attempt => 1, status => 500, error => 'status 500: no such \\"thing\\"',
        },
        'with all its keys');
    for my $n (2, 3)
    {
        sql("UPDATE outbox_events SET retry_after = now() WHERE id = '$id'");
        wait_for("a line about attempt $n", sub { failures($id) == $n });
        my $last = (failures($id))[-1];
        is($last->{attempt}, $n, '... with its number');
        is($last->{what}, $n < 3 ? 'delivery failed' : 'event is dead', '... and whether it was the last');
    }
    my ($line) = grep { /event is dead.*\Q$id\E/ } split /\n/, log_since($node);
    like($line, qr/WARNING/, 'a dead event is a warning');

    $receiver->rule(path => 'hangs', hang => 1);
    my $late = insert(event_type => 'hangs');
    my $failure = wait_failure($late);
    is($failure->{status}, 0, 'without an answer there is no status');
    like($failure->{error}, qr/timed out/, '... but an error');
    $receiver->clear_rules;
};

subtest 'names cannot forge lines or keys' => sub {
    $receiver->rule(path => '.', status => 500, body => qq(x" event_id=forged\n2026-01-01 00:00:00.000 UTC [1] LOG:  forged\r\nevent_id=forged));
    my $forged = qq(x" event_id="forged" y="\n2026-01-01 00:00:00.000 UTC [1] LOG:  forged\r\n\tforged \\" z);
    my @names = ($forged, 'with several spaces', 'a=b c=d', '\\', '\\\\"', '"', "tab\tbell\x07esc\x1b[31m", "\xc3\xbc\xe2\x82\xac", ' ', '');
    my %id = map { $_ => insert(aggregate_type => $names[$_], aggregate_id => $names[$_], event_type => $names[$_] =~ s/\A\z/e/r) } 0 .. $#names;
    for my $i (0 .. $#names)
    {
        my $failure = wait_failure($id{$i}) or next;
        is($failure->{odd}, undef, '... that consists of key=value');
        is($failure->{event_id}, $id{$i}, '... about that event');
        # With the escapes undone, the names are as they were.
        my %undone = map { $_ => $failure->{$_} =~ s/\\(?:x([0-9a-f]{2})|(.))/defined $1 ? chr hex $1 : $2/ger } qw(aggregate_type aggregate_id);
        is_deeply(\%undone, { aggregate_type => $names[$i], aggregate_id => $names[$i] }, '... with its names, escaped');
    }
    # Lines of the relay: the statements of the test itself are logged, too.
    my @lines = split /\n/, log_since($node);
    my @relay = grep { /outbox worker/ } @lines;
    is_deeply([ grep { /\bevent_id=(?:")?forged/ && !/\A.*?event_id=[0-9a-f-]{36}/ } @relay ], [], 'no line claims to be about another event');
    is_deeply([ grep { /\A2026-01-01/ } @lines ], [], 'no line was forged');
    is_deeply([ grep { /outbox: / && /[\x00-\x08\x0b-\x1f\x7f]/ } @lines ], [], 'nor is there a control character in one');
    $receiver->clear_rules;
};

subtest 'a row that cannot be sent is in the log without what is wrong with it' => sub {
    my $id = sql(q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers)
        VALUES ('order', 'bad', 'e', '{}', '{"x-api key": "hidden-value"}') RETURNING id));
    my $failure = wait_failure($id);
    is($failure->{what}, 'event is dead', 'it is dead');
    like($failure->{error}, qr/header/, '... for a reason');
    is_deeply([ grep { /hidden-value/ && /outbox: / } split /\n/, log_since($node) ], [], '... that does not repeat it');
};

# ---------------------------------------------------------------------------------------------------------
# Secrets

subtest 'no secret is in the log, in last_error or in any view' => sub {
    $receiver->clear_log;
    my %action = (
        status => { status => 500, body => 'boom' }, redirect => { location => '/elsewhere' }, cut => { status => 200, cut => 3 },
        reset  => { reset  => 1 },   close => { close => 1 },   hang => { hang => 1 },   nonsense => { raw => "nonsense\r\n\r\n" },
        throttled => { status => 429, headers => { 'Retry-After' => '3600' } },
    );
    $receiver->set_rules(map { { path => "^/hook/$_\\?", %{ $action{$_} } } } keys %action);
    my @ids = map { insert(event_type => $_, aggregate_type => "lane.$_") } sort keys %action;
    wait_failed(@ids);
    is($receiver->count({ authorization => "Bearer $secret{token}" }), $receiver->requests, 'the header is sent');
    is($receiver->count({ path => qr/\?key=$secret{query}\z/ }), $receiver->requests, '... and the query');

    # Values that the path must not hold, and an endpoint that cannot be reached.
    push @ids, insert(event_type => '..');
    $receiver->stop_listening(close => 1);
    push @ids, insert(event_type => 'refused');
    wait_failed(@ids);
    $receiver->start_listening;
    reload($node, 'outbox.connect_timeout' => '2s');
    reload($node, 'outbox.workers' => 2);
    wait_workers($node, 2);

    my %seen = (
        log              => log_since($node),
        outbox_events    => sql('SELECT e::text FROM outbox_events e'),
        outbox_status    => sql('SELECT s::text FROM outbox_status s'),
        outbox_workers   => sql('SELECT w::text FROM outbox_workers() w'),
        pg_stat_activity => sql('SELECT a::text FROM pg_stat_activity a'),
        'process titles' => join('', map { slurp_file("/proc/$_/cmdline") } worker_pids($node), launcher_pid($node), postmaster_pid($node)),
    );
    for my $place (sort keys %seen)
    {
        my @found = grep { $seen{$place} =~ /\Q$secret{$_}\E/ } sort keys %secret;
        is("@found", '', "$place: no secret");
        diag grep { /s3cr3t/ } map { "$_\n" } split /\n/, $seen{$place} if @found;
    }

    sql('CREATE ROLE curious LOGIN; GRANT SELECT, INSERT, UPDATE ON outbox_events TO curious');
    for my $query ('SHOW outbox.endpoint', 'SHOW outbox.http_headers', q(SELECT current_setting('outbox.endpoint')), 'SELECT string_agg(s::text, \'\') FROM pg_settings s',
        'SELECT string_agg(s::text, \'\') FROM pg_file_settings s')
    {
        my (undef, $out, $err) = $node->psql('postgres', $query, extra_params => [ '-U', 'curious' ]);
        unlike("$out $err", qr/s3cr3t/, "$query: not for an ordinary role");
    }
    $receiver->clear_rules;
};

subtest 'a secret that the receiver repeats goes no further' => sub {
    my $offset = log_offset($node);
    $receiver->rule(path => 'echo', status => 401, body => "invalid credentials: Bearer $secret{token} for $secret{user}:$secret{password}, key $secret{query}");
    my $id = insert(event_type => 'echo');
    wait_failed($id);
    my $row = event_row($node, $id);
    like($row->{last_error}, qr/\Astatus 401/, 'last_error has the status');
    unlike($row->{last_error}, qr/\Q$secret{token}\E/, '... not the token of http_headers');
    unlike($row->{last_error}, qr/\Q$secret{password}\E/, '... not the password of the endpoint');
    is_deeply([ grep { /\Q$secret{token}\E|\Q$secret{password}\E/ } split /\n/, log_since($node, $offset) ], [], '... nor does the log');
    $receiver->clear_rules;
};

subtest 'a secret in a setting that is refused is not repeated' => sub {
    my $offset = log_offset($node);
    set_conf($node,
        'outbox.http_headers' => '{"Authorization": "Bearer s3cr3t-refus3d", "Host": "x"}',
        'outbox.endpoint'     => 'ftp://user:s3cr3t-refus3d@host/');
    $node->reload;
    wait_log($node, qr/parameter "outbox\.$_"/, $offset, desc => "$_ is refused") for qw(http_headers endpoint);
    is_deeply([ grep { /s3cr3t-refus3d/ } split /\n/, log_since($node, $offset) ], [], 'its value is not in the log');
    reload($node,
        'outbox.http_headers' => qq({"Authorization": "Bearer $secret{token}"}),
        'outbox.endpoint'     => $endpoint);
};

# ---------------------------------------------------------------------------------------------------------
# Storms

# Seconds between the first and the last line of a text from the log.
sub duration
{
    my ($log) = @_;
    my @times = map { /$prefix/ && /\A\S+ (\d+):(\d+):([\d.]+)/ ? $1 * 3600 + $2 * 60 + $3 : () } split /\n/, $log;
    return @times ? ($times[-1] - $times[0] + 86_400) - 86_400 * int(($times[-1] - $times[0] + 86_400) / 86_400) : 0;
}

sub storm
{
    my ($n, $type) = @_;
    return sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'storm', '$type' || i, '$type', '{}' FROM generate_series(1, $n) i");
}

subtest 'a storm of failures is summed up' => sub {
    reload($node, 'outbox.workers' => 1, 'log_min_messages' => 'info', 'outbox.max_attempts' => 1);
    wait_workers($node, 1);
    sql('TRUNCATE outbox_events');
    for my $status (500, 503)
    {
        my $n = 3000;
        $receiver->rule(path => "storm$status", status => $status, body => 'down', headers => { 'Retry-After' => 3600 });
        my $offset = log_offset($node);
        my $counter = sql('SELECT sum(log_suppressed) FROM outbox_workers()');
        storm($n, "storm$status");
        wait_sql($node, 'postgres', "SELECT count(*) FROM outbox_events WHERE event_type = 'storm$status' AND last_error IS NOT NULL", $n,
            timeout => 90, desc => "$n events fail with status $status");
        # Each is either a line or part of a summary.
        my ($lines, $suppressed, $summaries);
        my $ok = wait_for(
            'the log accounts for all of them',
            sub {
                my $log = log_since($node, $offset);
                $lines = () = $log =~ /outbox: (?:delivery failed|event is dead)/g;
                my @numbers = $log =~ /outbox: ([0-9]+) more failures were not logged/g;
                $suppressed = 0;
                $suppressed += $_ for @numbers;
                $summaries = @numbers;
                return $lines + $suppressed == $n;
            },
            got => sub { "$lines lines, $suppressed in $summaries summaries" });
        my $seconds = duration(log_since($node, $offset));
        cmp_ok($lines, '<=', 10 * ($seconds + 2), '... in a bounded number of lines a second') or diag "$lines lines in $seconds s";
        cmp_ok($lines, '<', $n / 4, '... not a line for each');
        cmp_ok($summaries, '<=', $seconds + 2, '... at most a summary a second');
        is(sql('SELECT sum(log_suppressed) FROM outbox_workers()') - $counter, $suppressed, '... and the counter says the same');
    }
    $receiver->clear_rules;
};

subtest 'a storm of results that cannot be recorded is, too' => sub {
    sql('TRUNCATE outbox_events');
    my $n      = 300;
    my $offset = log_offset($node);
    sql(q[
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'nothing goes'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION refuse();
    ]);
    storm($n, 'e');
    $receiver->wait_requests(100, { path => qr/hook\/e\?/ });
    my $polls = sql('SELECT sum(wakeups_poll) FROM outbox_workers()');
    wait_for('some time', sub { sql('SELECT sum(wakeups_poll) FROM outbox_workers()') > $polls + 10 }, quiet => 1);
    my $log     = log_since($node, $offset);
    my $lines   = () = $log =~ /outbox: .*nothing goes/g;
    my $seconds = duration($log);
    cmp_ok($lines, '>', 0, 'the log says what is wrong');
    cmp_ok($lines, '<=', 10 * ($seconds + 2), '... in a bounded number of lines a second') or diag "$lines lines in $seconds s";
    sql('DROP TRIGGER refuse ON outbox_events');
    wait_drained($node, timeout => 90);
};

# ---------------------------------------------------------------------------------------------------------
# Encodings

subtest 'a failure whose words the database cannot spell does not stop the worker' => sub {
    sql(q(CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0));
    create_extension($node, 'latin');
    wait_workers($node, 1, db => 'latin');
    my @before = worker_pids($node, 'latin');
    my $offset = log_offset($node);
    $receiver->rule(path => 'spell', status => 500, body => "\xe2\x82\xac \xff \xf0\x9f\x98\x80 end");
    $receiver->hang(path => 'hangs');
    my @ids = split /\n/, sql(q[
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
        VALUES ('order', 'other', 'e', '{}'), ('order', E'\xe4', E'spell\xe4', '{"name": "\u00e4"}') RETURNING id] =~ s/\\xe4/\\344/gr, 'latin');
    wait_sql($node, 'latin', "SELECT last_error LIKE 'status 500: % end' FROM outbox_events WHERE id = '$ids[1]'", 't', desc => 'it is recorded');
    wait_for('a line about it', sub { (failures($ids[1], $offset))[0] });
    wait_sql($node, 'latin', "SELECT processed_at IS NOT NULL FROM outbox_events WHERE id = '$ids[0]'", 't', desc => 'others are delivered');
    is_deeply([ worker_pids($node, 'latin') ], \@before, 'the worker is still the same');
    is($receiver->count({ 'ce-id' => $ids[1] }), 1, '... and has sent it once');
};

unlike(log_since($node, 0), qr/PANIC|was terminated by/, 'nothing crashed on the way');

done_testing();
