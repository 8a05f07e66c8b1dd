# An answer that comes after somebody has changed the row: it never overwrites what was done, and is recorded where
# nothing speaks against it. An event is not sent again because its row moved or was locked.

use strict;
use warnings;

use JSON::PP;
use Test::More;

use OutboxTest;

# A failure that is recorded stays to be seen: the retry is far away.
my $receiver = start_receiver();
my $node     = new_node(
    'main',
    receiver => $receiver,
    fast     => 1,
    conf     => {
        'autovacuum'             => 'off',
        'outbox.retry_base'      => '2h',
        'outbox.retry_cap'       => '2h',
        'outbox.request_timeout' => '10min',
    });
create_extension($node);
wait_workers($node, 1);

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

# Events of a type that hangs once (or twice), each in an aggregate of its own; they are in flight when this returns.
my $aggregates = 0;
my $hangs      = 0;
$receiver->hang(with => { 'ce-type' => '^hangs$' },       per => 'ce-id', times => 1);
$receiver->hang(with => { 'ce-type' => '^hangs.twice$' }, per => 'ce-id', times => 2);

sub insert_sql
{
    my ($type, $aggregate) = @_;
    return "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '$aggregate', '$type', '{}') RETURNING id;";
}

sub in_flight
{
    my ($n, $type) = @_;
    my @ids = split /\n/, sql(join ' ', 'BEGIN;', (map { insert_sql($type // 'hangs', 'a' . ++$aggregates) } 1 .. $n), 'COMMIT');
    wait_for("$n in flight", sub { $n == grep { requests($_) == 1 } @ids }, quiet => 1);
    return @ids;
}

sub requests { my ($id) = @_; return $receiver->count({ 'ce-id' => $id }) }

# Answers the request of that event that hangs.
sub answer
{
    my ($id, $status) = @_;
    my @sent = $receiver->log({ 'ce-id' => $id });
    is($receiver->release(index => [ $sent[-1]{index} ], status => $status, body => 'late'), 1, "a late $status");
    return;
}

sub rows
{
    my $text = sql('SELECT coalesce(jsonb_object_agg(id, to_jsonb(e) || jsonb_build_object(\'state\', outbox_state(e))), \'{}\') FROM outbox_events e');
    return JSON::PP->new->utf8->decode($text);
}

sub state_is
{
    my ($row, $expected, $name) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return is_deeply({ map { $_ => $row->{$_} } keys %$expected }, $expected, $name);
}

# All answers that came before are handled: another event, answered later, is recorded.
sub handled
{
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_delivered(sql(insert_sql('marker', 'm' . ++$aggregates)), desc => 'others go on');
}

sub wait_delivered
{
    my ($id, %opt) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_sql($node, 'postgres', "SELECT processed_at IS NOT NULL FROM outbox_events WHERE id = '$id'", 't', %opt);
}

sub in { my (@ids) = @_; return 'id IN (' . join(', ', map { "'$_'" } @ids) . ')' }

my %fresh = (attempts => 0, last_error => undef, retry_after => undef);

# ---------------------------------------------------------------------------------------------------------

subtest 'processed by hand: the time stays as it was set' => sub {
    my ($ok, $bad) = in_flight(2);
    my $followers = sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) "
          . "SELECT aggregate_type, aggregate_id, 'follows', '{}' FROM outbox_events WHERE " . in($ok, $bad) . ' RETURNING id');
    sql(q(UPDATE outbox_events SET processed_at = '2001-02-03 04:05:06Z' WHERE ) . in($ok, $bad));
    answer($ok,  200);
    answer($bad, 500);
    handled();
    is(sql("SELECT count(*) FROM outbox_events WHERE processed_at = '2001-02-03 04:05:06Z'"), 2, 'nobody else sets it');
    my $rows = rows();
    state_is($rows->{$_}, { %fresh, state => 'delivered' }, 'nor anything else') for $ok, $bad;
    is_deeply([ map { requests($_) } $ok, $bad ], [ 1, 1 ], 'each was sent once');
    wait_drained($node, desc => 'those behind them follow');
    is_deeply([ map { requests($_) } split /\n/, $followers ], [ 1, 1 ], '... once');
};

subtest 'deleted: nothing comes back, those behind it follow' => sub {
    my ($ok, $bad) = in_flight(2);
    my $followers = sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) "
          . "SELECT aggregate_type, aggregate_id, 'follows', '{}' FROM outbox_events WHERE " . in($ok, $bad) . ' RETURNING id');
    sql('DELETE FROM outbox_events WHERE ' . in($ok, $bad));
    answer($ok,  200);
    answer($bad, 500);
    handled();
    is(sql('SELECT count(*) FROM outbox_events WHERE ' . in($ok, $bad)), 0, 'they are gone');
    is_deeply([ map { requests($_) } $ok, $bad ], [ 1, 1 ], 'each was sent once');
    wait_drained($node, desc => 'those behind them follow');
    is_deeply([ map { requests($_) } split /\n/, $followers ], [ 1, 1 ], '... once');
};

subtest 'deleted, and another row in its place: the answer is not taken for the other one' => sub {
    sql('TRUNCATE outbox_events');
    my ($old) = in_flight(1);
    my $place = sql('SELECT ctid FROM outbox_events');
    sql('DELETE FROM outbox_events');
    sql('VACUUM outbox_events');
    my ($new) = in_flight(1);
    is(sql("SELECT ctid FROM outbox_events WHERE id = '$new'"), $place, 'it is in the same place');
    answer($old, 200);
    handled();
    state_is(event_row($node, $new), { %fresh, state => 'ready', processed_at => undef }, 'it is not delivered by an answer to the other');
    answer($new, 500);
    wait_sql($node, 'postgres', "SELECT attempts FROM outbox_events WHERE id = '$new'", 1, desc => 'its own answer is recorded');
    sql('DELETE FROM outbox_events');
};

for my $late (200, 500)
{
    subtest "replayed, and then a late $late: the replay goes out" => sub {
        my ($id) = in_flight(1);
        is(sql("UPDATE outbox_events SET processed_at = now() WHERE id = '$id'; SELECT outbox_replay('$id')"), 't', 'replayed meanwhile');
        handled();
        is(requests($id), 1, 'not while the first request is in flight');
        answer($id, $late);
        $receiver->wait_requests(2, { 'ce-id' => $id }, timeout => 10, desc => 'the replay goes out');
        wait_delivered($id, timeout => 10, desc => '... and is recorded');
        my (undef, $replay) = $receiver->log({ 'ce-id' => $id });
        is_deeply($replay->{headers}{'outbox-replay'}, ['true'], '... with the mark');
        state_is(event_row($node, $id), { %fresh, state => 'delivered' }, '... and is a success');
        is(requests($id), 2, '... once');
        sql("DELETE FROM outbox_events WHERE id = '$id'");
    };
}

subtest 'a failure of the first send does not bury its replay' => sub {
    my ($id) = in_flight(1);
    reload($node, 'outbox.max_attempts' => 1);
    sql("UPDATE outbox_events SET processed_at = now() WHERE id = '$id'; SELECT outbox_replay('$id')");
    answer($id, 500);
    handled();
    isnt(event_row($node, $id)->{state}, 'dead', 'an event that was not sent again is not dead again');
    reload($node, 'outbox.max_attempts' => undef);
    sql("DELETE FROM outbox_events WHERE id = '$id'");
};

subtest 'attempts changed: a late failure leaves them, a late success counts' => sub {
    my ($bad, $ok) = in_flight(2, 'hangs.twice');
    my ($full) = in_flight(1);
    sql("UPDATE outbox_events SET attempts = 7 WHERE " . in($ok, $bad));
    sql("UPDATE outbox_events SET attempts = 10 WHERE id = '$full'");
    answer($bad,  500);
    answer($ok,   200);
    answer($full, 500);
    $receiver->wait_requests(2, { 'ce-id' => $bad }, desc => 'the failed one goes out again, as the row says');
    handled();
    my $rows = rows();
    state_is($rows->{$bad}, { %fresh, attempts => 7, state => 'ready', processed_at => undef }, 'the failure changed nothing');
    state_is($rows->{$ok}, { %fresh, attempts => 7, state => 'delivered' }, 'the success is recorded, attempts stay');
    is(requests($ok), 1, '... and nothing is sent again');
    wait_sql($node, 'postgres', "SELECT attempts, retry_after FROM outbox_events WHERE id = '$full'", '10|infinity',
        desc => 'at the limit by hand: buried');
    is(requests($full), 1, '... without being sent again');
    answer($bad, 200);
    wait_delivered($bad, desc => 'the second answer arrives');
    state_is(event_row($node, $bad), { attempts => 7, state => 'delivered' }, 'the second answer is recorded');
};

subtest 'retry_after changed: a late failure leaves it, a late success counts' => sub {
    my ($bad, $ok, $bad_buried, $ok_buried) = in_flight(4);
    sql("UPDATE outbox_events SET retry_after = '2999-01-01Z' WHERE " . in($bad, $ok));
    sql("UPDATE outbox_events SET retry_after = 'infinity' WHERE " . in($bad_buried, $ok_buried));
    answer($bad,        500);
    answer($bad_buried, 500);
    answer($ok,         200);
    answer($ok_buried,  200);
    handled();
    wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL AND ' . in($ok, $ok_buried), 2,
        desc => 'successes are recorded');
    is(sql("SELECT count(*) FROM outbox_events WHERE retry_after = '2999-01-01Z' AND id = '$bad'"), 1, 'the time that was set stays');
    my $rows = rows();
    state_is($rows->{$bad},        { attempts => 0, last_error => undef, state => 'waiting' }, '... and nothing is counted');
    state_is($rows->{$bad_buried}, { attempts => 0, last_error => undef, state => 'dead' },    'what was buried stays buried');
    state_is($rows->{$ok},        { %fresh, state => 'delivered' }, 'what succeeded does not wait any more');
    state_is($rows->{$ok_buried}, { %fresh, state => 'delivered' }, '... nor is it taken for discarded');
    is_deeply([ map { requests($_) } $bad, $ok, $bad_buried, $ok_buried ], [ 1, 1, 1, 1 ], 'each was sent once');
    sql('DELETE FROM outbox_events WHERE ' . in($bad));
};

subtest 'another column changed, the row moved: recorded all the same, not sent again' => sub {
    my ($ok, $bad) = in_flight(2);
    sql("UPDATE outbox_events SET payload = '{\"by\": \"hand\"}', created_at = '2001-01-01Z' WHERE " . in($ok, $bad)) for 1 .. 3;
    sql('VACUUM outbox_events');
    my ($ok_full, $bad_full) = in_flight(2);
    sql('VACUUM FULL outbox_events');
    answer($_, 200) for $ok,  $ok_full;
    answer($_, 500) for $bad, $bad_full;
    wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_events WHERE (processed_at IS NOT NULL OR attempts = 1) AND ' . in($ok, $bad, $ok_full, $bad_full),
        4, desc => 'all is recorded');
    my $rows = rows();
    state_is($rows->{$ok},  { %fresh, payload => { by => 'hand' }, state => 'delivered' }, 'the success, beside what was changed');
    state_is($rows->{$bad}, { attempts => 1, payload => { by => 'hand' }, last_error => 'status 500: late', state => 'waiting' }, '... and the failure');
    state_is($rows->{$ok_full}, { %fresh, state => 'delivered' }, 'the success of one in a table that was rewritten');
    state_is($rows->{$bad_full}, { attempts => 1, state => 'waiting' }, '... and the failure');
    handled();
    is_deeply([ map { requests($_) } $ok, $bad, $ok_full, $bad_full ], [ 1, 1, 1, 1 ], 'each was sent once');
    is_deeply([ map { event_row($node, $_)->{attempts} } $bad, $bad_full ], [ 1, 1 ], 'and counted once');
    sql('DELETE FROM outbox_events WHERE ' . in($bad, $bad_full));
};

subtest 'locked: recorded when the lock is gone, the event not sent twice, others not held up' => sub {
    my ($ok, $bad, $undone, $processed, $deleted, $shared) = my @all = in_flight(6);
    my $session = $node->background_psql('postgres');
    $session->query_safe('BEGIN');
    $session->query_safe('SELECT FROM outbox_events WHERE ' . in($ok, $bad) . ' FOR UPDATE');
    $session->query_safe('SELECT FROM outbox_events WHERE ' . in($shared) . ' FOR KEY SHARE');
    $session->query_safe("UPDATE outbox_events SET processed_at = '2001-02-03 04:05:06Z' WHERE id = '$processed'");
    $session->query_safe("DELETE FROM outbox_events WHERE id = '$deleted'");
    $session->query_safe("SAVEPOINT s; UPDATE outbox_events SET attempts = 9 WHERE id = '$undone'; ROLLBACK TO s");
    answer($_, 200) for $ok, $undone, $deleted, $shared;
    answer($_, 500) for $bad, $processed;
    handled();
    wait_sql($node, 'postgres', "SELECT processed_at IS NOT NULL FROM outbox_events WHERE id = '$shared'", 't',
        desc => 'a foreign key to the row holds up nothing');
    wait_sql($node, 'postgres', 'SELECT unrecorded >= 4 FROM outbox_workers()', 't', desc => 'the others wait to be recorded');
    handled();
    is(sql('SELECT count(*) FROM outbox_events WHERE processed_at IS NULL AND attempts = 0 AND ' . in($ok, $bad, $processed, $deleted)), 4,
        'a row that is locked is not touched');
    is_deeply([ map { requests($_) } @all ], [ (1) x 6 ], '... and its event not sent again');
    $session->query_safe('COMMIT');
    $session->quit;
    wait_sql($node, 'postgres', "SELECT string_agg(outbox_state(e) || ' ' || attempts, ',' ORDER BY seq) FROM outbox_events e WHERE " . in(@all),
        'delivered 0,waiting 1,delivered 0,delivered 0,delivered 0', desc => 'recorded when the lock is gone');
    is(sql("SELECT count(*) FROM outbox_events WHERE id = '$processed' AND processed_at = '2001-02-03 04:05:06Z' AND last_error IS NULL"), 1,
        '... but not over what the transaction did');
    wait_sql($node, 'postgres', 'SELECT unrecorded FROM outbox_workers()', 0, desc => 'nothing is left to be recorded');
    is_deeply([ map { requests($_) } @all ], [ (1) x 6 ], 'each was sent once');
    sql("DELETE FROM outbox_events WHERE id = '$bad'");
};

subtest 'TRUNCATE while requests are in flight: what is inserted after it goes out' => sub {
    reload($node, 'outbox.poll_interval' => '1h');    # the poll must not be what finds it
    my ($ok, $bad) = in_flight(2);
    my $aggregate = sql("SELECT aggregate_id FROM outbox_events WHERE id = '$ok'");
    sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', '$aggregate', 'queued', '{}' FROM generate_series(1, 40)");
    my $gone = sql('TRUNCATE outbox_events RESTART IDENTITY; ' . insert_sql('e', 'after') . insert_sql('e', $aggregate));
    answer($ok,  200);
    answer($bad, 500);
    wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL', 2,
        timeout => 20, desc => 'new events with old numbers are delivered');
    is($receiver->count({ 'ce-type' => '^queued$' }), 0, 'nothing that was truncated is sent later');
    is_deeply([ map { requests($_) } $ok, $bad, split /\n/, $gone ], [ 1, 1, 1, 1 ], 'nothing twice');
    is(sql('SELECT unrecorded FROM outbox_workers()'), 0, 'and nothing is left to be recorded');
};

is(sql('SELECT in_flight FROM outbox_status'), 0, 'nothing is in flight at the end');
is_deeply([ $receiver->overlaps_per_aggregate ], [], 'no aggregate had two requests at once');
is(scalar(worker_pids($node)), 1, 'the worker is still there');
unlike(log_since($node, 0), qr/PANIC|FATAL|ERROR|was terminated/, 'and nothing went wrong on the way');

done_testing();
