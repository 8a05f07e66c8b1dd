# What an answer means: which failures count, how long an event waits, when it is dead, and that it goes on by itself.

use strict;
use warnings;

use Encode ();
use JSON::PP;
use POSIX qw(strftime);
use Test::More;

use OutboxTest;

my $receiver = start_receiver();
my $node     = new_node(
    'main',
    receiver => $receiver,
    fast     => 1,
    conf     => {
        'outbox.retry_base'      => '100s',
        'outbox.retry_cap'       => '7d',
        'outbox.max_attempts'    => 4,
        'outbox.request_timeout' => '1s',
        'outbox.connect_timeout' => '2s',
    });
create_extension($node);

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

# Every failure that the relay records, with the times between which it did: what retry_after is measured against.
sql(q[
    CREATE TABLE recorded (n bigserial, id uuid, attempts int, retry_after timestamptz, error text,
                           earliest timestamptz, latest timestamptz);
    CREATE FUNCTION record() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.recorded (id, attempts, retry_after, error, earliest, latest)
        VALUES (NEW.id, NEW.attempts, NEW.retry_after, NEW.last_error, now(), clock_timestamp());
        RETURN NEW;
    END $$;
    CREATE TRIGGER record AFTER UPDATE ON outbox_events FOR EACH ROW
        WHEN (NEW.processed_at IS NULL AND NEW.last_error IS NOT NULL) EXECUTE FUNCTION record();
]);
wait_workers($node, 1);

# By hand, past the trigger above.
sub by_hand { my ($query) = @_; return sql("SET session_replication_role = replica; $query") }
sub retry_now { return by_hand(q(UPDATE outbox_events SET retry_after = now() WHERE processed_at IS NULL AND retry_after < 'infinity')) }

# Events, each in an aggregate of its own, with other columns too.
my $aggregates = 0;

sub insert
{
    my @statements;
    for my $given (@_)
    {
        my %column = (aggregate_type => 'order', aggregate_id => 'a' . ++$aggregates, event_type => 'e', payload => '{}', %$given);
        my @names = sort keys %column;
        push @statements, sprintf 'INSERT INTO outbox_events (%s) VALUES (%s) RETURNING id;',
          join(', ', @names), join(', ', map { "'$column{$_}'" } @names);
    }
    my @ids = split /\n/, sql("BEGIN; @statements COMMIT");
    return wantarray ? @ids : $ids[0];
}

# The same, of these event types; ids by type.
sub insert_types
{
    my (@types) = @_;
    my @ids = insert(map { { event_type => $_, aggregate_type => "lane.$_" } } @types);
    return map { $types[$_] => $ids[$_] } 0 .. $#types;
}

# All events by id, as event_row() gives one.
sub rows
{
    my $text = sql('SELECT coalesce(jsonb_object_agg(id, to_jsonb(e) || jsonb_build_object(\'state\', outbox_state(e))), \'{}\') FROM outbox_events e');
    return JSON::PP->new->utf8->decode($text);
}

# Failures of an event as recorded: number of the attempt, and the least and the most that its delay can have been.
sub all_delays
{
    my %delays;
    for (split /\n/, sql(
            'SELECT id, attempts, CASE WHEN isfinite(retry_after) THEN extract(epoch FROM retry_after - latest) END, '
              . 'CASE WHEN isfinite(retry_after) THEN extract(epoch FROM retry_after - earliest) END FROM recorded ORDER BY n'))
    {
        my ($id, @delay) = split /\|/, $_, -1;
        push @{ $delays{$id} }, \@delay;
    }
    return \%delays;
}

sub delays { my ($id) = @_; return @{ all_delays()->{$id} // [] } }

# Each of these has failed at least that often.
sub wait_failures
{
    my ($n, @ids) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    my @late;
    return wait_for(
        @ids . " events failed $n times",
        sub { my $delays = all_delays(); @late = grep { @{ $delays->{$_} // [] } < $n } @ids; return !@late },
        got => sub { "late: @late" });
}

# The delay in seconds was in that range; what the recording itself took is between its two measures.
sub delay_between
{
    my ($delay, $least, $most, $name) = @_;
    my (undef, $low, $high) = @$delay;
    ok($high >= $least && $low <= $most, $name) or diag "at least $low, at most $high, wanted $least to $most";
    return;
}

sub of { my ($id) = @_; return { 'ce-id' => $id } }

sub counter { my ($name) = @_; return sql("SELECT sum($name) FROM outbox_workers()") }

# Several polls have passed: time for an accident to happen.
sub wait_polls
{
    my ($n) = @_;
    my $before = counter('wakeups_poll');
    return wait_for("$n polls", sub { counter('wakeups_poll') >= $before + $n }, quiet => 1);
}

# ---------------------------------------------------------------------------------------------------------
# Failures of the event

subtest 'an event whose own delivery fails does not wait for ever and is not lost' => sub {
    my $flood = join '', map { "X-Flood-$_: " . 'x' x 1000 . "\r\n" } 1 .. 400;
    my %kind = (
        'status.500'     => [ { status => 500, body => 'boom' }, qr/\Astatus 500: boom\z/ ],
        'status.404'     => [ { status => 404 }, qr/\Astatus 404\z/ ],
        'status.400'     => [ { status => 400, body => "no\r\nsuch\tthing" }, qr/\Astatus 400: no such thing\z/ ],
        'status.501.big' => [ { status => 501, body_size => 300_000 }, qr/\Astatus 501: 0123456789abcdef/ ],
        'redirect'       => [ { location => $receiver->url('/page') }, qr/\Astatus 302/ ],
        'redirect.307'   => [ { status => 307, location => $receiver->url('/page') }, qr/\Astatus 307/ ],
        'cut'            => [ { status => 200, cut => 10 }, qr/closed with 100 bytes remaining/ ],
        'cut.chunked'    => [ { status => 200, chunked => ['abc'], chunked_break => 'no_end' }, qr/closed with outstanding read data/ ],
        'bad.chunk'      => [ { status => 200, chunked => ['abc'], chunked_break => 'size' }, qr/chunk/i ],
        'cut.then.hangs' => [ { status => 200, cut => 10, hang => 1 }, qr/timed out/ ],
        'timeout'        => [ { hang => 1 }, qr/timed out/ ],
        'reset'          => [ { reset => 1 }, qr/reset|Recv failure/i ],
        'empty'          => [ { close => 1 }, qr/empty reply/i ],
        'header.flood'   => [ { raw_headers => $flood }, qr/./ ],
    );
    my @kinds = sort keys %kind;
    $receiver->set_rules(map { { with => { 'ce-type' => "^\Q$_\E\$" }, name => $_, %{ $kind{$_}[0] } } } @kinds);
    my ($ok, @ids) = insert(map { { event_type => $_ } } 'fine', @kinds);
    my %id;
    @id{@kinds} = @ids;

    for my $n (1 .. 4)
    {
        wait_failures($n, values %id);
        my $rows = rows();
        for my $kind (grep { $n < 4 } @kinds)
        {
            my $row = $rows->{ $id{$kind} };
            is_deeply([ @$row{qw(attempts state processed_at)} ], [ $n, 'waiting', undef ], "$kind: attempt $n is counted, and it waits");
            next if $n > 1;
            like($row->{last_error}, $kind{$kind}[1], "... its last_error says what happened");
            cmp_ok(length $row->{last_error}, '<=', 1024, '... in at most 1 kB');
        }
        retry_now() if $n < 4;
    }
    is(event_row($node, $ok)->{state}, 'delivered', 'another event of the same lane is delivered meanwhile');

    my ($delays, $rows) = (all_delays(), rows());
    for my $kind (@kinds)
    {
        my @delays = @{ $delays->{ $id{$kind} } };
        is_deeply([ map { $_->[0] } @delays ], [ 1 .. 4 ], "$kind: no attempt is counted twice or skipped");
        delay_between($delays[ $_ - 1 ], 80 * 2**($_ - 1), 120 * 2**($_ - 1), "... attempt $_ waits about base x 2^" . ($_ - 1)) for 1 .. 3;
        my $row = $rows->{ $id{$kind} };
        is_deeply([ @$row{qw(attempts state processed_at retry_after)} ], [ 4, 'dead', undef, 'infinity' ], '... dead at max_attempts');
        next if $kind =~ /reset|empty/;    # libcurl may repeat a request on a kept-alive connection that dies
        is($receiver->count(of($id{$kind})), 4, '... after that many requests');
    }
    is(sql('SELECT string_agg(event_type, \' \' ORDER BY event_type COLLATE "C") FROM outbox_dead_letters'), "@kinds",
        'every dead event is to be seen in outbox_dead_letters');
    is($receiver->count({ path => qr/page/ }), 0, 'a redirect is never followed');
    is($receiver->count({ method => 'GET' }), 0, '... not as GET either');

    my $requests = $receiver->requests;
    wait_polls(4);
    is($receiver->requests, $requests, 'a dead event is not sent again by itself');

    $receiver->clear_rules;
    $receiver->clear_log;
    is(sql('SELECT bool_and(outbox_replay(id)) FROM outbox_dead_letters'), 't', 'every dead event can be replayed');
    wait_drained($node);
    for my $kind (@kinds)
    {
        my ($sent, @more) = $receiver->log(of($id{$kind}));
        is_deeply([ scalar @more, $sent->{headers}{'outbox-replay'}, $sent->{headers}{'idempotency-key'} ], [ 0, ['true'], [ $id{$kind} ] ],
            "$kind: its replay carries the mark and the same id");
    }
    is(sql('SELECT count(*) FROM outbox_events WHERE attempts <> 0 OR last_error IS NOT NULL OR processed_at IS NULL'), 0,
        'and the replays are delivered without a trace of the failures');
};

subtest 'an answer that is not HTTP counts: the event had been sent' => sub {
    $receiver->rule(raw => "this is not HTTP\r\n\r\n");
    my $id = insert({ event_type => 'nonsense' });
    wait_failures(1, $id);
    is(event_row($node, $id)->{attempts}, 1, 'the attempt is counted');
    $receiver->clear_rules;
    retry_now();
    wait_drained($node);
};

subtest 'replay is only for what is delivered or dead' => sub {
    reload($node, 'outbox.request_timeout' => '60s');
    $receiver->clear_log;
    $receiver->rule(with => { 'ce-type' => 'fails' }, status => 500);
    $receiver->hang(with => { 'ce-type' => 'hangs' }, times => 1);
    my ($waiting, $hanging, $behind) = insert(
        { event_type => 'fails' },
        { event_type => 'hangs', aggregate_id => 'behind' },
        { event_type => 'e',     aggregate_id => 'behind' });
    wait_failures(1, $waiting);
    $receiver->wait_hung(1);
    is(sql("SELECT outbox_replay('$waiting'), outbox_replay('$hanging'), outbox_replay('$behind')"), 'f|f|f',
        'one that waits is not, nor one in flight, nor one behind another');
    is(sql('SELECT outbox_replay(gen_random_uuid()), outbox_replay(NULL)'), 'f|f', 'nor an unknown one, nor null');
    $receiver->release;
    $receiver->clear_rules;
    retry_now();
    wait_drained($node);
    is_deeply([ map { $receiver->count(of($_)) } $waiting, $hanging, $behind ], [ 2, 1, 1 ], 'and nothing was sent because of it');
    is($receiver->count({ 'outbox-replay' => qr/./ }), 0, '... or marked');
    is(sql("SELECT outbox_replay('$behind')"), 't', 'a delivered one is');
    $receiver->wait_requests(2, of($behind));
    wait_drained($node);
    is_deeply([ map { $_->{headers}{'outbox-replay'} } $receiver->log(of($behind)) ], [ undef, ['true'] ], '... with the mark');
};

# ---------------------------------------------------------------------------------------------------------
# Failures of the endpoint

reload($node, 'outbox.max_attempts' => 1, 'outbox.retry_base' => '50ms', 'outbox.retry_cap' => '500ms');

subtest 'a throttling endpoint or a failing gateway uses up no attempts' => sub {
    $receiver->clear_log;
    $receiver->rule(with => { 'ce-type' => "^gateway.$_\$" }, status => $_) for 429, 502, 503, 504;
    my %id = insert_types(map { "gateway.$_" } 429, 502, 503, 504);
    wait_failures(2, values %id);
    my ($delays, $rows) = (all_delays(), rows());
    for my $status (429, 502, 503, 504)
    {
        my $id  = $id{"gateway.$status"};
        my $row = $rows->{$id};
        is_deeply([ @$row{qw(attempts processed_at)} ], [ 0, undef ], "$status is tried again, but not counted");
        like($row->{last_error}, qr/\Astatus $status/, '... and last_error says why');
        is_deeply([ grep { $_->[0] != 0 || $_->[1] eq '' } @{ $delays->{$id} } ], [], '... at no time');
    }
    is(sql('SELECT count(*) FROM outbox_dead_letters'), 0, 'there are no dead letters');
    $receiver->clear_rules;
    wait_drained($node);
    $rows = rows();
    is_deeply([ map { @{ $rows->{$_} }{qw(state attempts)} } values %id ], [ ('delivered', 0) x 4 ], 'all is delivered when it has healed');
};

subtest 'an endpoint that cannot be reached uses up no attempts' => sub {
    my @outages = (
        [ 'connection refused', sub { $receiver->stop_listening(close => 1) }, sub { $receiver->start_listening }, qr/connect/i ],
        [
            'unknown host',
            sub { reload($node, 'outbox.endpoint' => 'http://no-such-host.invalid/') },
            sub { reload($node, 'outbox.endpoint' => $receiver->url('/')) },
            qr/resolv/i,
        ],
        [
            'TLS where there is none',
            sub { reload($node, 'outbox.endpoint' => 'https://' . $receiver->host . '/') },
            sub { reload($node, 'outbox.endpoint' => $receiver->url('/')) },
            qr/./,
        ],
    );
    for my $outage (@outages)
    {
        my ($name, $break, $heal, $error) = @$outage;
        $break->();
        $receiver->clear_log;
        my $id = insert({ aggregate_type => $name });
        wait_failures(2, $id);
        my $row = event_row($node, $id);
        is_deeply([ @$row{qw(attempts processed_at)} ], [ 0, undef ], "$name: tried again and again, but not counted");
        like($row->{last_error}, $error, '... and last_error says why') or diag $row->{last_error};
        is(sql('SELECT count(*) FROM outbox_dead_letters'), 0, '... no dead letter');
        $heal->();
        $receiver->wait_requests(1, of($id), desc => '... and sent when it has healed');
        wait_drained($node);
        is(event_row($node, $id)->{attempts}, 0, '... with no attempt counted');
        is($receiver->count(of($id)), 1, '... once');
    }
};

# ---------------------------------------------------------------------------------------------------------
# Retry-After

reload($node, 'outbox.max_attempts' => 10);

subtest 'a receiver that names a time is not asked before it' => sub {
    $receiver->clear_log;
    my $date  = time + 4;
    my $text  = strftime('%a, %d %b %Y %H:%M:%S GMT', gmtime $date);
    my %after = ('500.seconds' => 2, '503.seconds' => 2, '404.date' => $text, '429.date' => $text);
    for my $kind (sort keys %after)
    {
        $receiver->rule(with => { 'ce-type' => "^$kind\$" }, times => 1, status => substr($kind, 0, 3), headers => { 'Retry-After' => $after{$kind} });
    }
    my %id = insert_types(keys %after);
    wait_drained($node);
    my $delays = all_delays();
    for my $kind (sort keys %after)
    {
        my ($first, $second, @more) = $receiver->log(of($id{$kind}));
        is(scalar @more, 0, "$kind: sent twice");
        if ($kind =~ /seconds/)
        {
            cmp_ok($second->{arrival} - $first->{answered}, '>=', 2e6, '... not before the number of seconds');
            delay_between($delays->{ $id{$kind} }[0], 2, 2, '... retry_after says so');
        }
        else
        {
            cmp_ok($second->{arrival}, '>=', $date * 1e6, '... not before the date');
            delay_between($delays->{ $id{$kind} }[0], 0, 4, '... retry_after says so');
        }
    }
};

subtest 'no Retry-After holds an event for longer than an hour or breaks the arithmetic' => sub {
    my %after = (
        negative => '-5', word    => 'abc',              empty => '',           zero => '0',
        huge     => '1000000000000000000',               beyond => '9' x 40,    day  => '86400',
        fraction => '1.5', past   => 'Sun, 06 Nov 1994 08:49:37 GMT',           far  => 'Fri, 31 Dec 9999 23:59:59 GMT',
        baddate  => 'Mon, 99 Foo 2024 99:99:99 GMT',     minimum => '-9223372036854775808',
    );
    for my $status (500, 503)
    {
        $receiver->rule(with => { 'ce-type' => "^$status.$_\$" }, status => $status, headers => { 'Retry-After' => $after{$_} }) for keys %after;
    }
    my %id = insert_types(map { ("500.$_", "503.$_") } sort keys %after);
    wait_failures(1, values %id);
    my $delays = all_delays();
    for my $kind (sort keys %id)
    {
        my $delay = $delays->{ $id{$kind} }[0];
        if    ($kind =~ /huge|beyond|far/) { delay_between($delay, 0,    3600, "$kind: waits at most an hour") }
        elsif ($kind =~ /day/)             { delay_between($delay, 3600, 3600, "$kind: waits an hour") }
        else                               { delay_between($delay, 0.04, 2,    "$kind: waits as without it") }
    }
    $receiver->clear_rules;
    retry_now();
    wait_drained($node);
};

# ---------------------------------------------------------------------------------------------------------
# On its own

subtest 'a due retry needs no insert and no poll to wake the worker' => sub {
    reload($node, 'outbox.poll_interval' => '1h', 'outbox.retry_base' => '300ms', 'outbox.retry_cap' => '1s');
    $receiver->set_rules(
        { with => { 'ce-type' => '^event$' }, per => 'ce-id', times => 3, status => 500 },
        { with => { 'ce-type' => '^lane$' },  per => 'ce-id', times => 1, status => 503 });
    $receiver->clear_log;
    my ($event, $lane) = insert({ event_type => 'event', aggregate_type => 'one' }, { event_type => 'lane', aggregate_type => 'other' });
    $receiver->wait_requests(1, of($_), answered => 1) for $event, $lane;
    my $before = counter('wakeups_poll') . '/' . counter('wakeups_commit');
    $receiver->wait_requests(4, of($event), desc => 'a retry of an event comes by itself');
    $receiver->wait_requests(2, of($lane),  desc => 'a retry after a failure of the endpoint comes by itself');
    wait_drained($node);
    is(counter('wakeups_poll') . '/' . counter('wakeups_commit'), $before, 'nothing else woke the worker');
    is(event_row($node, $event)->{attempts}, 3, 'attempts stay after a success');
    $receiver->clear_rules;
    reload($node, 'outbox.poll_interval' => '200ms', 'outbox.retry_base' => '50ms', 'outbox.retry_cap' => '500ms');
};

# ---------------------------------------------------------------------------------------------------------
# attempts is a column that anybody may have written

my @wild = (-2147483648, -1, 0, 30, 31, 32, 62, 63, 64, 100_000, 2147483645);

subtest 'no number of attempts overflows the back-off' => sub {
    reload($node, 'outbox.max_attempts' => 2147483647, 'outbox.retry_base' => '1s', 'outbox.retry_cap' => '20s');
    $receiver->rule(status => 500);
    $receiver->clear_log;
    my ($last, @ids) = insert(map { { attempts => $_ } } 2147483646, @wild);
    my %id;
    @id{@wild} = @ids;
    wait_failures(1, values %id);
    my $delays = all_delays();
    for my $n (@wild)
    {
        my $delay = $delays->{ $id{$n} }[0];
        my $counted = $n < 0 ? qr/\A(?:@{[ $n + 1 ]}|1)\z/ : qr/\A@{[ $n + 1 ]}\z/;
        like($delay->[0], $counted, "$n attempts: one more is counted");
        if   ($n < 1) { delay_between($delay, 0.8, 1.2, '... and it waits the base') }
        else          { delay_between($delay, 16,  24,  '... and it waits the cap') }
    }
    wait_sql($node, 'postgres', "SELECT attempts, retry_after FROM outbox_events WHERE id = '$last'", '2147483647|infinity',
        desc => 'the highest number that there is, reached, is the end');
    my $met = insert({ attempts => 2147483647 });
    wait_sql($node, 'postgres', "SELECT attempts, retry_after FROM outbox_events WHERE id = '$met'", '2147483647|infinity',
        desc => '... and met, too');
    is($receiver->count(of($met)), 0, '... without being sent');
    is(scalar(worker_pids($node)), 1, 'the worker lives');
};

subtest 'a row that meets the limit is buried without being sent, and holds up nobody' => sub {
    reload($node, 'outbox.max_attempts' => undef);    # 10
    sql('TRUNCATE outbox_events');
    $receiver->clear_rules;
    $receiver->clear_log;
    my @met = insert(map { { attempts => $_, aggregate_id => 'same' } } 10, 11, 30, 31, 63, 100_000, 2147483647, 9, 0, -1);
    my @others = splice @met, 7;
    wait_drained($node);
    my $rows = rows();
    for my $id (@met)
    {
        my $row = $rows->{$id};
        is_deeply([ $row->{state}, $receiver->count(of($id)) ], [ 'dead', 0 ], "attempts $row->{attempts}: dead, never sent");
        like($row->{last_error}, qr/limit/, '... last_error says why');
    }
    is_deeply([ map { $rows->{$_}{state} } @others ], [ ('delivered') x 3 ], 'those below the limit are delivered');

    is(sql("SELECT outbox_replay('$met[-1]')"), 't', 'one that was buried can be replayed');
    sql("UPDATE outbox_events SET attempts = 0, retry_after = NULL WHERE id = '$met[0]'");
    wait_drained($node);
    is_deeply([ map { event_row($node, $_)->{state} } @met[ -1, 0 ] ], [ ('delivered') x 2 ], '... or revived by hand');
};

subtest 'max_attempts can be lowered and raised by a reload' => sub {
    reload($node, 'outbox.retry_base' => '100s', 'outbox.retry_cap' => '100s');
    $receiver->rule(status => 500);
    $receiver->clear_log;
    my $id = insert({});
    for my $n (1, 2)
    {
        wait_sql($node, 'postgres', "SELECT attempts FROM outbox_events WHERE id = '$id'", $n);
        retry_now() if $n < 2;
    }
    reload($node, 'outbox.max_attempts' => 2);
    retry_now();
    wait_sql($node, 'postgres', "SELECT state FROM (SELECT outbox_state(e) AS state FROM outbox_events e WHERE id = '$id') s", 'dead',
        desc => 'an event that has had more attempts than are allowed now is buried');
    is($receiver->count(of($id)), 2, '... without being sent again');
    reload($node, 'outbox.max_attempts' => 5);
    wait_polls(3);
    is_deeply([ event_row($node, $id)->{state}, $receiver->count(of($id)) ], [ 'dead', 2 ], 'raising the limit raises no dead');
    $receiver->clear_rules;
    sql("UPDATE outbox_events SET attempts = 0, retry_after = NULL WHERE id = '$id'");
    wait_drained($node);
    is(event_row($node, $id)->{state}, 'delivered', '... a hand does');
};

# ---------------------------------------------------------------------------------------------------------
# Bodies of answers

subtest 'what a failing receiver says cannot spoil the table' => sub {
    my %body = (
        bytes      => "\xff\xfe\x00\x01 half \xc3( \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\x80 end",
        nuls       => "\0" x 5000,
        long       => 'x' x 5000,
        two        => "\xc3\xa9" x 3000,
        three      => 'x' . "\xe2\x82\xac" x 3000,
        four       => "\xf0\x9f\x98\x80" x 3000,
        cut        => 'y' x 16_383 . "\xf0\x9f\x98\x80",
        controls   => join('', map { chr } 0 .. 31, 127) x 10 . "\xc2\x85 \xe2\x80\xa8",
        lines      => "one\r\ntwo\nthree",
        quotes     => q('"; DROP TABLE outbox_events; --\\),
    );
    $receiver->rule(with => { 'ce-type' => "^$_\$" }, status => 500, body => $body{$_}) for keys %body;
    my %id = insert_types(keys %body);
    wait_failures(1, values %id);
    my %bytes = map { split /\|/ } split /\n/,
      sql(q(SELECT event_type, encode(convert_to(last_error, 'UTF8'), 'hex') FROM outbox_events WHERE last_error IS NOT NULL));
    for my $kind (sort keys %body)
    {
        my $bytes = pack 'H*', $bytes{$kind};
        my $text = eval { Encode::decode('UTF-8', my $copy = $bytes, Encode::FB_CROAK) };
        ok(defined $text, "$kind: last_error is valid UTF-8") or next;
        unlike($text, qr/[\x00-\x1f\x7f-\x9f]/, '... without control characters');
        cmp_ok(length $bytes, '<=', 1024, '... at most 1 kB');
        like($text, qr/\Astatus 500/, '... beginning with the status');
    }
    like(event_row($node, $id{bytes})->{last_error}, qr/half .* end\z/, 'what can be read stays readable');
    is(event_row($node, $id{lines})->{last_error}, 'status 500: one two three', '... on one line');
    is(event_row($node, $id{quotes})->{last_error}, "status 500: $body{quotes}", '... as it was');
    $receiver->clear_rules;
    retry_now();
    wait_drained($node);
};

subtest 'a receiver that answers at length has not failed' => sub {
    my %answer = (
        '5MB'     => { body_size => 5_000_000 },
        'chunks'  => { chunked   => [ ('z' x 50_000) x 20 ] },
        'created' => { status    => 201, body => 'x' x 70_000 },
        'nothing' => { status    => 204 },
    );
    $receiver->rule(with => { 'ce-type' => "^$_\$" }, %{ $answer{$_} }) for keys %answer;
    $receiver->clear_log;
    my %id = insert_types(keys %answer);
    wait_drained($node);
    my $rows = rows();
    for my $kind (sort keys %answer)
    {
        my $row = $rows->{ $id{$kind} };
        is_deeply([ @$row{qw(state attempts last_error)} ], [ 'delivered', 0, undef ], "$kind: delivered");
        is($receiver->count(of($id{$kind})), 1, '... by one request');
    }
};

is(scalar(worker_pids($node)), 1, 'the worker is still there');
unlike(log_since($node, 0), qr/PANIC|FATAL|was terminated/, 'and nothing crashed on the way');

done_testing();
