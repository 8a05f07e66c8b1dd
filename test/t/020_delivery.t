# What is committed arrives, what is rolled back does not; by the wake-up at commit, and where there is none by the
# safety poll.

use strict;
use warnings;

use Test::More;

use OutboxTest;

# With a poll an hour away, whatever arrives was announced at commit.
my $receiver = start_receiver();
my $node     = new_node(
    'main',
    receiver => $receiver,
    conf     => { 'outbox.poll_interval' => '1h', 'max_prepared_transactions' => 5 });
create_extension($node);
wait_workers($node, 1);

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

# Statements that may fail; all in one session.
sub try_sql { my ($query) = @_; return $node->psql('postgres', $query, on_error_stop => 0) }

my $row = q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES );

sub event { my ($name, $type) = @_; return sprintf q[('%s', '%s', 'e', '{}')], $type // 'order', $name }

sub counter { my ($name) = @_; return sql("SELECT sum($name) FROM outbox_workers()") }

sub arrived { return map { $receiver->aggregate($_) } $receiver->log }

# The aggregates that arrived, after everything that was committed before has.
my $markers = 0;

sub arrived_until_marker
{
    my $name = 'marker' . ++$markers;
    sql($row . event($name));
    $receiver->wait_requests(1, sub { $receiver->aggregate($_) eq "order/$name" }, desc => 'the marker arrives');
    wait_drained($node);
    return [ grep { !/marker/ } arrived() ];
}

# ---------------------------------------------------------------------------------------------------------
# Committed or not

my ($id) = publish($node, type => 'order', id => '42', event => 'order.created', payload => { total => 10 });
$receiver->wait_requests(1, desc => 'a committed event is not lost, nor does it wait for the poll');
wait_drained($node);
my $sent = event_row($node, $id);
is($sent->{state}, 'delivered', 'a success is recorded');
ok(defined $sent->{processed_at}, '... with its time');
is($sent->{attempts}, 0, '... and no attempt counted');
is($sent->{last_error}, undef, '... and no error');
is(counter('wakeups_commit') >= 1, 1, 'the wake-up at commit is counted');
is(counter('wakeups_poll'), 0, '... and no poll was needed');
is(counter('delivered'), 1, '... one event delivered');

subtest 'no ghost: what did not commit is never sent' => sub {
    $receiver->clear_log;
    sql('CREATE TABLE business (id int PRIMARY KEY, parent int REFERENCES business DEFERRABLE INITIALLY DEFERRED)');

    sql('BEGIN; ' . $row . event('rollback') . '; ROLLBACK');
    sql('BEGIN; ' . $row . event('kept-1') . '; SAVEPOINT s; ' . $row . event('savepoint') . '; ROLLBACK TO s; '
        . $row . event('kept-2') . '; COMMIT');
    sql('BEGIN; SAVEPOINT s; ' . $row . event('only-savepoint') . '; ROLLBACK TO s; COMMIT');
    try_sql('BEGIN; ' . $row . event('error') . '; SELECT 1/0; COMMIT;');
    try_sql('BEGIN; ' . $row . event('deferred') . '; INSERT INTO business VALUES (1, 2); COMMIT;');
    try_sql($row . event('half') . ', ' . event('half') . ", ('order', 'half', 'e', NULL);");
    sql(q(DO $$ BEGIN ) . $row . event('kept-3') . '; BEGIN ' . $row . event('exception')
        . q(; PERFORM 1/0; EXCEPTION WHEN division_by_zero THEN NULL; END; END $$));
    sql('BEGIN; ' . $row . event('prepared') . q(; PREPARE TRANSACTION 'never'));
    sql(q(ROLLBACK PREPARED 'never'));

    my $session = $node->background_psql('postgres', on_error_die => 0);
    $session->query_safe('BEGIN');
    $session->query_safe($row . event('killed'));
    my $pid = $session->query_safe('SELECT pg_backend_pid()');
    sql("SELECT pg_terminate_backend($pid)");
    wait_sql($node, 'postgres', "SELECT count(*) FROM pg_stat_activity WHERE pid = $pid", 0,
        desc => 'the session of an open transaction dies');
    eval { $session->quit };

    is_deeply([ sort @{ arrived_until_marker() } ], [qw(order/kept-1 order/kept-2 order/kept-3)],
        'rolled back, to a savepoint, failed, failed at commit, killed: nothing arrives but what was committed');
    is_deeply([ $receiver->duplicates ], [], '... once each');

    my $open = $node->background_psql('postgres');
    $open->query_safe('BEGIN');
    $open->query_safe($row . event('open'));
    is_deeply([ grep { /open/ } @{ arrived_until_marker() } ], [], 'an event is not sent before its commit');
    $open->query_safe('COMMIT');
    $receiver->wait_requests(1, sub { $receiver->aggregate($_) eq 'order/open' },
        desc => '... and at once after it, though a later one was sent');
    $open->quit;
    wait_drained($node);
};

# ---------------------------------------------------------------------------------------------------------
# Announced, in whatever shape the transaction comes

sub arrives
{
    my ($accident, $n, $do) = @_;
    subtest $accident => sub {
        $receiver->clear_log;
        my $polls = counter('wakeups_poll');
        $do->();
        $receiver->wait_requests($n, desc => "$n arrived");
        wait_drained($node);
        is($receiver->requests, $n, '... and no more');
        is_deeply([ $receiver->duplicates ], [], '... none twice');
        is_deeply([ $receiver->out_of_order ], [], '... in order');
        is(counter('wakeups_poll'), $polls, '... without a poll');
    };
    return;
}

arrives('INSERT … SELECT of 5 000 rows', 5000, sub {
    sql(q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
          SELECT 'bulk', (i % 500)::text, 'e', jsonb_build_object('n', i) FROM generate_series(1, 5000) i));
});

arrives('COPY', 500, sub {
    sql("COPY outbox_events (aggregate_type, aggregate_id, event_type, payload) FROM stdin;\n"
        . join('', map { "order\t$_\te\t{\"n\": $_}\n" } 1 .. 500) . "\\.\n");
});

arrives('twenty new lanes in one transaction', 100, sub {
    sql('BEGIN; '
        . join(' ', map { $row . join(',', map { event($_, "lane$_") } 1 .. 20) . ';' } 1 .. 5)
        . ' COMMIT');
});

arrives('a long name', 2, sub {
    my $long = 'x' x 100;
    sql($row . event($long, $long) . ', ' . event('é' x 100, 'ü' x 100));
});

arrives('rows that a function inserts in a loop with subtransactions', 50, sub {
    sql(q(DO $$ BEGIN FOR i IN 1..50 LOOP BEGIN ) . $row
        . q[('order', 'loop', 'e', '{}'); EXCEPTION WHEN OTHERS THEN RAISE; END; END LOOP; END $$]);
});

arrives('a session in the role of a replica', 1, sub {
    sql('SET session_replication_role = replica; ' . $row . event('replica'));
});

arrives('COMMIT AND CHAIN', 2, sub {
    sql('BEGIN; ' . $row . event('chain') . '; COMMIT AND CHAIN; ' . $row . event('chain') . '; COMMIT');
});

arrives('a procedure that commits in between', 5, sub {
    sql(q(CREATE PROCEDURE several() LANGUAGE plpgsql AS $$ BEGIN FOR i IN 1..5 LOOP ) . $row
        . q[('order', 'procedure', 'e', '{}'); COMMIT; END LOOP; END $$; CALL several()]);
});

arrives('more commits than can be announced while the worker is stopped', 1500, sub {
    my ($worker) = worker_pids($node, 'postgres');
    kill 'STOP', $worker;
    sql(join ' ', map { $row . event($_ % 100) . ';' } 1 .. 1500);
    kill 'CONT', $worker;
});

subtest 'a writer needs no more than INSERT, or EXECUTE on outbox_publish()' => sub {
    $receiver->clear_log;
    sql('CREATE ROLE writer LOGIN; GRANT INSERT ON outbox_events TO writer; GRANT EXECUTE ON FUNCTION outbox_publish TO writer;'
        . 'CREATE ROLE pretender LOGIN; GRANT EXECUTE ON FUNCTION outbox_publish TO pretender');
    my @as_writer = (extra_params => [ '-U', 'writer' ]);
    my (undef, $published) = $node->psql('postgres',
        q(SELECT outbox_publish('order', 'published', 'order.created', '{"a": 1}', '{"tenant": "t1"}')), @as_writer);
    my ($ret, $out, $err) = $node->psql('postgres', $row . event('inserted'), @as_writer);
    is("$ret$err", '0', 'INSERT works');
    $receiver->wait_requests(2);
    my ($entry) = $receiver->log({ tenant => 't1' });
    is($receiver->event_id($entry), $published, 'outbox_publish() gave the id that was sent');
    is($receiver->aggregate($entry), 'order/published', '... for that aggregate');
    is($entry->{body}, '{"a": 1}', '... with that payload');
    for my $query ('SELECT * FROM outbox_events', 'UPDATE outbox_events SET attempts = 0', 'DELETE FROM outbox_events',
        "SELECT outbox_replay('$published')")
    {
        (undef, undef, $err) = $node->psql('postgres', $query, @as_writer);
        like($err, qr/permission denied/, "... and may not $query");
    }
    (undef, undef, $err) = $node->psql('postgres', q(SELECT outbox_publish('a', 'b', 'c', '{}')),
        extra_params => [ '-U', 'pretender' ]);
    like($err, qr/permission denied for table outbox_events/, 'outbox_publish() lends nobody the right to insert');
    wait_drained($node);
};

subtest 'a statement is refused rather than sent wrong' => sub {
    my @values = (
        q[(repeat('x', 101), 'a', 'e', '{}')], q[('a', repeat('x', 101), 'e', '{}')],
        q[('a', 'b', repeat('x', 101), '{}')], q[(NULL, 'a', 'e', '{}')], q[('a', 'b', 'e', NULL)], q[('a', 'b', 'e', '{no json')]);
    my $rows = sql('SELECT count(*) FROM outbox_events');
    my $rows = sql('SELECT count(*) FROM outbox_events');
    my (undef, undef, $err) = try_sql(join '', map { "$row$_; SELECT outbox_publish$_;\n" } @values);
    my @errors = $err =~ /ERROR: +(.*)/g;
    is(scalar @errors, 2 * @values, 'too long, null and no JSON') or diag $err;
    is(sql('SELECT count(*) FROM outbox_events'), $rows, 'nothing was written');
};

# ---------------------------------------------------------------------------------------------------------
# Not announced

# Another lane's event arrives, the one in question may stay; then the poll finds it.
sub found_by_poll
{
    my ($accident, $do) = @_;
    subtest $accident => sub {
        $receiver->clear_log;
        my $polls = counter('wakeups_poll');
        my $name  = $do->();
        arrived_until_marker_of_other_lane();
        is(counter('wakeups_poll'), $polls, 'no poll so far');
        reload($node, 'outbox.poll_interval' => '100ms');
        $receiver->wait_requests(1, sub { $receiver->aggregate($_) eq $name }, desc => 'the poll finds it');
        wait_drained($node);
        is_deeply([ grep { $_ eq $name } arrived() ], [$name], '... and it is sent once');
        cmp_ok(counter('wakeups_poll'), '>', $polls, '... and the poll is counted');
        reload($node, 'outbox.poll_interval' => '1h');
        arrived_until_marker_of_other_lane();    # then the worker has seen the reload, which is a poll itself
        wait_drained($node);
    };
    return;
}

sub arrived_until_marker_of_other_lane
{
    my $name = 'marker' . ++$markers;
    sql($row . event($name, 'elsewhere'));
    $receiver->wait_requests(1, sub { $receiver->aggregate($_) eq "elsewhere/$name" }, desc => 'another lane goes on');
    return;
}

found_by_poll('inserted by a replica-role session with the trigger disabled', sub {
    sql('ALTER TABLE outbox_events DISABLE TRIGGER outbox_insert_notify');
    sql('SET session_replication_role = replica; ' . $row . event('untriggered', 'silent'));
    sql('ALTER TABLE outbox_events ENABLE ALWAYS TRIGGER outbox_insert_notify');
    is($receiver->requests, 0, 'nothing is sent without an announcement: the test tests the poll');
    return 'silent/untriggered';
});

found_by_poll('in a lane where higher numbers were sent', sub {
    sql('ALTER TABLE outbox_events DISABLE TRIGGER outbox_insert_notify');
    sql($row . event('untriggered', 'order'));
    sql('ALTER TABLE outbox_events ENABLE ALWAYS TRIGGER outbox_insert_notify');
    return 'order/untriggered';
});

found_by_poll('COMMIT PREPARED', sub {
    sql('BEGIN; ' . $row . event('prepared', 'two-phase') . q(; PREPARE TRANSACTION 'later'));
    sql(q(COMMIT PREPARED 'later'));
    return 'two-phase/prepared';
});

found_by_poll('a dead letter revived by hand', sub {
    sql($row . event('revived', 'dead'));
    $receiver->wait_requests(1);
    wait_drained($node);
    $receiver->clear_log;
    sql(q(UPDATE outbox_events SET processed_at = NULL, attempts = 10, retry_after = 'infinity' WHERE aggregate_type = 'dead'));
    is(count_dead($node), 1, 'it is dead');
    arrived_until_marker_of_other_lane();
    sql('UPDATE outbox_events SET attempts = 0, retry_after = NULL WHERE aggregate_type = \'dead\'');
    return 'dead/revived';
});

arrives('a dead letter revived by hand, with outbox_wake()', 1, sub {
    sql(q(UPDATE outbox_events SET processed_at = NULL, attempts = 10, retry_after = 'infinity' WHERE aggregate_type = 'dead'));
    sql(q(BEGIN; UPDATE outbox_events SET attempts = 0, retry_after = NULL WHERE aggregate_type = 'dead';
          SELECT outbox_wake(); COMMIT));
});

arrives('outbox_replay()', 1, sub {
    is(sql("SELECT outbox_replay('$id')"), 't', 'a delivered event can be replayed');
});

is($receiver->counts->{malformed}, 0, 'no request was malformed');

done_testing();
