# Whoever writes events, or looks after their table, never waits for the relay, and the relay never holds a transaction
# while it waits for the network.

use strict;
use warnings;

use Test::More;

use OutboxTest;

my $receiver = start_receiver();
my $node     = new_node(
    'main',
    receiver => $receiver,
    conf     => {
        'outbox.request_timeout' => '10min',
        'outbox.poll_interval'   => '100ms',
        'autovacuum'             => 'off',
    });
create_extension($node);
wait_workers($node, 1);

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

my $row = q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES );

sub event { my ($name) = @_; return qq[('order', '$name', 'e', '{}')] }

# Fails, instead of waiting, where something is in the way.
sub goes_through
{
    my ($statement, $name) = @_;
    my ($ret, $out, $err) = $node->psql('postgres', "SET lock_timeout = '1s';\nSET client_min_messages = warning;\n$statement");
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return is("$ret$err", '0', $name // $statement);
}

my $worker_locks = q(SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE a.backend_type = 'outbox worker');

# What a transaction of the relay would show: snapshot, transaction, lock.
my $held = q(SELECT
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox %' AND backend_xmin IS NOT NULL),
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox %'
     AND (backend_xid IS NOT NULL OR xact_start IS NOT NULL)),
    (SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE backend_type LIKE 'outbox %'),
    (SELECT sum(turns) FROM outbox_workers()));

# With the poll out of the way nothing but the network is waited for, and nothing begins a transaction any more.
sub relay_holds_nothing
{
    my ($when) = @_;
    reload($node, 'outbox.poll_interval' => '1h');
    my @looks;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    wait_for(
        "the relay holds no snapshot, transaction or lock $when",
        sub {
            @looks = map { sql($held) } 1 .. 3;
            return $looks[0] =~ /^0\|0\|0\|/ && $looks[0] eq $looks[1] && $looks[0] eq $looks[2];
        },
        got => sub { "@looks" });
    reload($node, 'outbox.poll_interval' => '100ms');
    return;
}

# ---------------------------------------------------------------------------------------------------------
# While requests hang

sql('CREATE TABLE note (id int PRIMARY KEY, event uuid NOT NULL REFERENCES outbox_events)');
my $rule = $receiver->hang(with => { 'ce-type' => '^hang$' });
my @hanging = publish($node, n => 5, aggregates => 5, event => 'hang');
$receiver->wait_hung(5);
is(sql('SELECT sum(in_flight) FROM outbox_workers()'), 5, 'five requests are in flight');
is(sql(q(SELECT in_flight, pending FROM outbox_status)), '5|5', '... says the status');

relay_holds_nothing('while it waits for the network');

subtest 'writers do not wait for requests' => sub {
    goes_through($row . event('writer'), 'INSERT');
    goes_through($row . event('1') . ', ' . event('2'), 'INSERT for the aggregates in flight');
    goes_through(q(SELECT outbox_publish('order', '1', 'e', '{}')));
    goes_through("INSERT INTO note VALUES (1, '$hanging[0]')", 'a foreign key to an event in flight');
    goes_through("UPDATE note SET event = '$hanging[1]' WHERE id = 1", '... and its change');
    goes_through("BEGIN; SELECT 1 FROM outbox_events WHERE id = '$hanging[2]' FOR UPDATE; COMMIT", 'SELECT FOR UPDATE of one');
    goes_through("UPDATE outbox_events SET headers = '{}' WHERE id = '$hanging[2]'", 'UPDATE of one');
    goes_through("DELETE FROM outbox_events WHERE id = '$hanging[3]'", 'DELETE of one');
    goes_through("SELECT outbox_replay('$hanging[0]')");
};

subtest 'whoever looks after the table does not wait for requests' => sub {
    goes_through('ALTER TABLE outbox_events ADD COLUMN extra text');
    goes_through('ALTER TABLE outbox_events DROP COLUMN extra');
    goes_through('ALTER TABLE outbox_events ADD CONSTRAINT positive CHECK (seq > 0)');
    goes_through('ALTER TABLE outbox_events DROP CONSTRAINT positive');
    goes_through('ALTER TABLE outbox_events SET (fillfactor = 90)');
    goes_through('CREATE INDEX more ON outbox_events (event_type)');
    goes_through('DROP INDEX more');
    goes_through('CREATE INDEX CONCURRENTLY more ON outbox_events (event_type)');
    goes_through('DROP INDEX CONCURRENTLY more');
    goes_through('VACUUM outbox_events');
    goes_through('VACUUM (FREEZE, ANALYZE) outbox_events');
    goes_through('REINDEX TABLE CONCURRENTLY outbox_events');
    goes_through('REINDEX TABLE outbox_events');
    goes_through('VACUUM FULL outbox_events');
    goes_through('CLUSTER outbox_events USING outbox_events_pkey');
    goes_through('BEGIN; LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE; COMMIT');
    goes_through('CREATE TRIGGER more AFTER UPDATE ON outbox_events FOR EACH ROW WHEN (false) EXECUTE FUNCTION suppress_redundant_updates_trigger()');
    goes_through('DROP TRIGGER more ON outbox_events');
    is($receiver->hung, 5, 'the requests were not given up for that');
};

# What vacuum may not remove, because somebody could still see it.
subtest 'a hanging request does not keep dead rows alive' => sub {
    sql('CREATE TABLE churn (n int); INSERT INTO churn SELECT generate_series(1, 1000); DELETE FROM churn');
    my (undef, undef, $err) = $node->psql('postgres', 'VACUUM VERBOSE churn');
    like($err, qr/tuples: 1000 removed, \d+ remain, 0 are dead/, 'vacuum removes them all');
};

$receiver->remove_rule($rule);
is($receiver->release, 5, 'the requests are answered');
wait_drained($node);
is(sql('SELECT count(*) FROM outbox_events WHERE processed_at IS NULL'), 0, 'their results are recorded, wherever the rows have moved');
is(sql("SELECT count(*) FROM outbox_events WHERE id = '$hanging[3]'"), 0, '... but the deleted one');
is_deeply([ $receiver->duplicates ], [], '... and nothing was sent twice');
is_deeply([ $receiver->overlaps_per_aggregate ], [], '... nor two of one aggregate at a time');
is_deeply([ $receiver->out_of_order ], [], '... nor out of order');

relay_holds_nothing('when it is idle');

# ---------------------------------------------------------------------------------------------------------
# While writers and others hold locks

subtest 'the relay does not queue for the table: nobody waits behind it' => sub {
    $receiver->clear_log;
    my $rule = $receiver->hang();
    my @ids = publish($node, n => 3, aggregates => 3);
    $receiver->wait_hung(3);
    $receiver->remove_rule($rule);

    my $operator = $node->background_psql('postgres');
    $operator->query_safe('BEGIN');
    $operator->query_safe('LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE');
    is($receiver->release, 3, 'answers come while somebody holds the table');
    # The polls go on; each would be an opportunity to queue.
    my $polls = sql('SELECT sum(wakeups_poll) FROM outbox_workers()');
    my ($waiting, $locks, $looks) = (0, 0, 0);
    wait_sql($node, 'postgres', 'SELECT state FROM outbox_relay()', 'table locked', desc => 'the relay says what keeps it');
    wait_for('several polls went by', sub {
        $waiting += sql("$worker_locks AND NOT l.granted");
        $locks   += sql("$worker_locks AND l.relation = 'outbox_events'::regclass");
        $looks++;
        return $looks >= 5 && sql('SELECT sum(wakeups_poll) FROM outbox_workers()') >= $polls + 3;
    });
    is($waiting, 0, "the relay waits for no lock ($looks looks)");
    is($locks, 0, '... and has none on the table');
    is(sql(q(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox worker' AND wait_event_type = 'Lock')), 0,
        '... it waits for something else');
    $operator->query_safe('COMMIT');
    wait_drained($node, desc => 'it goes on as soon as the table is free');
    is_deeply([ $receiver->duplicates ], [], '... and sends nothing again');
    wait_sql($node, 'postgres', 'SELECT state FROM outbox_status', 'ok', desc => '... and says so');

    # Weaker locks: the relay writes, so SHARE keeps it out, too.
    $operator->query_safe('BEGIN');
    $operator->query_safe('LOCK TABLE outbox_events IN SHARE MODE');
    wait_sql($node, 'postgres', 'SELECT state FROM outbox_relay()', 'table locked', desc => 'a SHARE lock keeps it as well');
    is(sql("$worker_locks AND NOT l.granted"), 0, '... waiting for no lock');
    $operator->query_safe('COMMIT');
    my ($id) = publish($node);
    wait_for('it goes on', sub { defined event_row($node, $id)->{processed_at} });

    # Behind somebody who waits for the table: still not in the queue.
    my $reader = $node->background_psql('postgres');
    $reader->query_safe('BEGIN');
    $reader->query_safe('SELECT count(*) FROM outbox_events');
    $operator->query_until(qr/asking/, "\\echo asking\nALTER TABLE outbox_events ADD COLUMN extra text;\n");
    wait_sql($node, 'postgres', q(SELECT count(*) FROM pg_locks WHERE relation = 'outbox_events'::regclass AND NOT granted), 1,
        desc => 'somebody waits to alter the table');
    wait_sql($node, 'postgres', 'SELECT state FROM outbox_relay()', 'table locked', desc => 'the relay gives way');
    is(sql(q(SELECT count(*) FROM pg_locks WHERE relation = 'outbox_events'::regclass AND NOT granted)), 1, '... and does not queue behind');
    $reader->query_safe('COMMIT');
    $operator->query_safe('ALTER TABLE outbox_events DROP COLUMN extra');
    ($id) = publish($node);
    wait_for('it goes on', sub { defined event_row($node, $id)->{processed_at} });
    $_->quit for $operator, $reader;
};

subtest 'a row that somebody holds is left alone, its aggregate waits, others go on' => sub {
    $receiver->clear_log;
    reload($node, 'outbox.endpoint' => '');
    my @ids = publish($node, id => 'held', n => 3);
    push @ids, publish($node, id => 'free', n => 3);
    my $other = $node->background_psql('postgres');
    $other->query_safe('BEGIN');
    is($other->query_safe("SELECT 1 FROM outbox_events WHERE id = '$ids[0]' FOR UPDATE SKIP LOCKED"), 1, 'another relay holds a row');
    reload($node, 'outbox.endpoint' => $receiver->url('/'));
    $receiver->wait_requests(3, { 'ce-partitionkey' => 'free' }, desc => 'the others go on');
    publish($node, id => 'marker');
    $receiver->wait_requests(1, { 'ce-partitionkey' => 'marker' });
    is($receiver->count({ 'ce-partitionkey' => 'held' }), 0, 'neither it nor what follows it is sent');
    is(sql("$worker_locks AND NOT l.granted"), 0, 'the relay waits for no row lock');
    $other->query_safe("UPDATE outbox_events SET processed_at = now() WHERE id = '$ids[0]'");
    $other->query_safe('COMMIT');
    $receiver->wait_requests(2, { 'ce-partitionkey' => 'held' }, desc => 'what follows goes when the lock is gone');
    wait_drained($node);
    is_deeply([ $receiver->ids({ 'ce-partitionkey' => 'held' }) ], [ @ids[ 1, 2 ] ], '... but not what the other has processed');

    # A foreign key's lock is none that says "mine".
    $receiver->clear_log;
    $rule = $receiver->hang(with => { 'ce-partitionkey' => '^referenced$' });
    my ($id) = publish($node, id => 'referenced');
    $receiver->wait_hung(1);
    $other->query_safe('BEGIN');
    $other->query_safe("INSERT INTO note VALUES (2, '$id')");
    $receiver->remove_rule($rule);
    $receiver->release;
    wait_for('a reference to an event does not keep its result from being recorded', sub { defined event_row($node, $id)->{processed_at} });
    $other->query_safe('COMMIT');

    $other->query_safe('BEGIN');
    $other->query_safe("INSERT INTO note VALUES (3, '$id')");
    sql("SELECT outbox_replay('$id')");
    $receiver->wait_requests(2, { 'ce-partitionkey' => 'referenced' }, desc => '... nor from being claimed');
    wait_drained($node);
    $other->query_safe('COMMIT');

    # The result comes while somebody holds the row: recorded later, the rest at once.
    $rule = $receiver->hang(with => { 'ce-type' => '^hang$' });
    @ids = publish($node, n => 3, aggregates => 3, event => 'hang');
    $receiver->wait_hung(3);
    $other->query_safe('BEGIN');
    $other->query_safe("SELECT 1 FROM outbox_events WHERE id = '$ids[1]' FOR UPDATE");
    $receiver->remove_rule($rule);
    $receiver->release;
    wait_for('results of other rows are recorded', sub { !grep { !defined event_row($node, $_)->{processed_at} } @ids[ 0, 2 ] });
    is(event_row($node, $ids[1])->{processed_at}, undef, '... the held one is not');
    publish($node, id => 'marker2');
    $receiver->wait_requests(1, { 'ce-partitionkey' => 'marker2' }, desc => 'the relay goes on meanwhile');
    $other->query_safe('COMMIT');
    wait_drained($node);
    is($receiver->count(sub { $receiver->event_id($_) eq $ids[1] }), 1, '... it is recorded later, not sent again');
    $other->quit;
};

subtest 'a trigger that cannot wake the relay does not fail the writer' => sub {
    reload($node, 'outbox.databases' => '');
    wait_workers($node, 0);
    goes_through($row . event('unattended'), 'INSERT without any worker');
    is(sql('SELECT state FROM outbox_status'), 'stopped by outbox.databases', 'the status says why it waits');
    reload($node, 'outbox.databases' => '*');
    wait_drained($node, desc => 'it arrives when there is a worker again');
    my $session = $node->background_psql('postgres');
    for my $isolation ('REPEATABLE READ', 'SERIALIZABLE')
    {
        $session->query_safe("BEGIN ISOLATION LEVEL $isolation");
        $session->query_safe($row . event('isolated'));
        publish($node, n => 20, aggregates => 20);
        wait_for("meanwhile the relay is at work ($isolation)", sub { count_pending($node) == 0 });
        $session->query_safe('UPDATE note SET id = id');
        $session->query_safe('COMMIT');
    }
    wait_drained($node, desc => 'writers at any isolation level are left in peace');
    $session->quit;
};

# ---------------------------------------------------------------------------------------------------------
# Rows that cannot be deleted

subtest 'an event that a business row refers to does not stop the others from being deleted' => sub {
    sql('TRUNCATE outbox_events, note');
    my ($first, @others) = publish($node, n => 20, aggregates => 20);
    wait_drained($node);
    sql("INSERT INTO note VALUES (1, '$first')");
    reload($node, 'outbox.retention' => '1s');
    wait_sql($node, 'postgres', "SELECT count(*) FROM outbox_events WHERE id <> '$first'", 0, timeout => 30,
        desc => 'retention deletes what nobody refers to');
    is(sql('SELECT count(*) FROM outbox_events'), 1, 'the other stays');
    is(sql('SELECT state FROM outbox_status'), 'ok', '... and nothing is wrong with that');
};

subtest 'deleted on delivery: an event that a business row refers to is not sent again and again' => sub {
    reload($node, 'outbox.retention' => '0');
    sql('TRUNCATE outbox_events, note');
    $receiver->clear_log;
    sql(q(WITH e AS (INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
              VALUES ('order', 'referenced', 'e', '{}') RETURNING id)
          INSERT INTO note SELECT 1, id FROM e));
    publish($node, id => 'referenced', event => 'next');
    publish($node, n => 5, aggregates => 5);
    $receiver->wait_requests(7, desc => 'all arrive, what follows it, too', timeout => 20);
    wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_events WHERE processed_at IS NULL', 0, timeout => 20,
        desc => 'it counts as delivered');
    my ($worker) = worker_pids($node, 'postgres');
    sql("SELECT pg_terminate_backend($worker)");
    wait_workers($node, 1, not => [$worker]);
    publish($node, id => 'marker');
    $receiver->wait_requests(1, { 'ce-partitionkey' => 'marker' });
    is_deeply([ $receiver->duplicates ], [], 'it is not sent again by the next worker');
};

done_testing();
