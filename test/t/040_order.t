# Events of one aggregate go one at a time and in order, whatever fails, and however many workers come and go; nothing
# goes twice.

use strict;
use warnings;

use IPC::Run ();
use PostgreSQL::Test::Utils ();
use Test::More;

use OutboxTest;

my $receiver = start_receiver(seed => 4);
my $node     = new_node(
    'main',
    receiver => $receiver,
    conf     => {
        'outbox.workers'       => 4,
        'outbox.poll_interval' => '1h',
        'outbox.retry_base'    => '20ms',
        'outbox.retry_cap'     => '100ms',
        'outbox.max_attempts'  => 100_000,
        'max_connections'      => 50,
    });
create_extension($node);
wait_workers($node, 4);

my @slow = (delay_ms => [ 1, 20 ]);

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

sub one_at_a_time_in_order_once
{
    my ($n) = @_;
    my $failed = 0;
    $failed += !is($receiver->requests, $n, '... nothing lost, nothing more');
    $failed += !is_deeply([ $receiver->overlaps_per_aggregate ], [], '... never two of one aggregate at a time');
    $failed += !is_deeply([ $receiver->out_of_order ], [], '... in order');
    $failed += !is_deeply([ $receiver->duplicates ], [], '... nothing twice');
    return !$failed;
}

sub fresh
{
    $receiver->clear_rules;
    $receiver->default(status => 200);
    $receiver->clear_log;
    return;
}

my $scripts = PostgreSQL::Test::Utils::tempdir();
my $script_number = 0;

sub script
{
    my (@lines) = @_;
    my $file = "$scripts/" . ++$script_number . '.sql';
    PostgreSQL::Test::Utils::append_to_file($file, join '', map { "$_\n" } @lines);
    return $file;
}

sub pgbench
{
    my ($script, @options) = @_;
    return ('pgbench', '-n', '-h', $node->host, '-p', $node->port, '-f', $script, @options, 'postgres');
}

# ---------------------------------------------------------------------------------------------------------
# Many workers

subtest 'four workers neither overtake each other nor do the work twice' => sub {
    $receiver->default(@slow);
    publish($node, n => 2000, aggregates => 200);
    publish($node, n => 200,  aggregates => 200) for 1 .. 5;
    $receiver->wait_requests(3000, answered => 1, desc => '3 000 events of 200 aggregates arrive');
    wait_drained($node);
    one_at_a_time_in_order_once(3000);
    cmp_ok($receiver->max_in_flight, '>=', 32, '... many at once');
    is(sql('SELECT count(*) FROM outbox_workers() WHERE delivered > 0'), 4, '... from all workers');
    is(sql('SELECT sum(delivered) FROM outbox_workers()'), 3000, '... each recorded once');
    fresh();
};

subtest 'writers in parallel that lock what they write about' => sub {
    sql('CREATE TABLE business (id int PRIMARY KEY, n int NOT NULL); INSERT INTO business SELECT i, 0 FROM generate_series(0, 19) i');
    my $script = script(
        '\set id random(0, 19)',
        'BEGIN;',
        'UPDATE business SET n = n + 1 WHERE id = :id;',
        q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) )
          . q(SELECT 'business', id, 'e', jsonb_build_object('n', n) FROM business WHERE id = :id;),
        'COMMIT;');
    $receiver->default(delay_ms => [ 0, 5 ]);
    $node->command_ok([ pgbench($script, '-c', 8, '-j', 2, '-t', 150) ], 'eight writers');
    $receiver->wait_requests(1200, answered => 1, desc => '1 200 events arrive without a poll');
    wait_drained($node);
    one_at_a_time_in_order_once(1200);
    my (%n, @wrong);
    for my $e ($receiver->log)
    {
        my $id = $e->{headers}{'ce-partitionkey'}[0];
        push @wrong, "$id: $e->{body}" if $e->{body} ne sprintf '{"n": %d}', ++$n{$id};
    }
    is_deeply(\@wrong, [], '... in the order in which the business rows changed');
    fresh();
};

subtest 'workers that come and go lose nothing, send nothing twice, and keep the order' => sub {
    $receiver->default(@slow);
    my $total = 4000;
    my $script = script(
        '\set id random(1, 200)',
        q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', :id, 'e', '{}');));
    # One writer, so that the numbers are in order of commit; events keep coming while the workers change.
    my $writer = IPC::Run::start([ pgbench($script, '-c', 1, '-t', $total, '-R', 300) ], '>', "$scripts/out", '2>&1');
    my $changes = 0;
    for my $workers ((1, 3, 4, 2, 4) x 4)
    {
        last if $changes >= 5 && !$writer->pumpable;
        my $before = $receiver->requests;
        reload($node, 'outbox.workers' => $workers);
        wait_workers($node, $workers, desc => "$workers work now");
        $changes++ if $receiver->requests < $total;
        note "from the ${before}th to the " . $receiver->requests . 'th request';
    }
    ok($writer->finish, 'the writer') or diag PostgreSQL::Test::Utils::slurp_file("$scripts/out");
    cmp_ok($changes, '>=', 3, "the workers changed $changes times while events came");
    $receiver->wait_requests($total, answered => 1);
    wait_drained($node);
    one_at_a_time_in_order_once($total);
    reload($node, 'outbox.workers' => 4);
    wait_workers($node, 4);
    publish($node, n => 64, aggregates => 64);
    $receiver->wait_requests($total + 64, desc => 'no bucket is left without a worker');
    wait_drained($node);
    fresh();
};

subtest 'a bucket whose request hangs changes hands when it is answered, not at the next poll' => sub {
    my $rule = $receiver->hang(with => { 'ce-type' => '^stuck$' });
    publish($node, n => 40, aggregates => 40, event => 'stuck');
    $receiver->wait_hung(40);
    reload($node, 'outbox.workers' => 2);
    publish($node, n => 200, aggregates => 200, event => 'behind');
    is($receiver->hung, 40, 'no request is given up, or sent again by another worker');
    $receiver->remove_rule($rule);
    # The last ones one by one, so that no worker is woken by what another one does.
    my $answered = 0;
    for my $some (32, (1) x 8)
    {
        $answered += $receiver->release(max => $some);
        wait_sql($node, 'postgres', q(SELECT count(*) FROM outbox_events WHERE event_type = 'stuck' AND processed_at IS NOT NULL),
            $answered, quiet => 1);
    }
    is($answered, 40, 'the requests are answered');
    $receiver->wait_requests(240, answered => 1, desc => 'everything arrives', timeout => 20);
    wait_drained($node);
    wait_workers($node, 2, desc => 'workers that are not wanted any more leave');
    one_at_a_time_in_order_once(240);
    reload($node, 'outbox.workers' => 4);
    wait_workers($node, 4);
    fresh();
};

# ---------------------------------------------------------------------------------------------------------
# One aggregate

subtest 'a hot aggregate holds up no other' => sub {
    sql(q(BEGIN;
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
          SELECT 'order', 'hot', 'e', '{}' FROM generate_series(1, 2000);
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
          SELECT 'order', 'other' || i % 50, 'e', '{}' FROM generate_series(1, 100) i;
        COMMIT));
    $receiver->wait_requests(2100, answered => 1, timeout => 120, desc => '2 000 events of one aggregate, 100 of others');
    wait_drained($node);
    one_at_a_time_in_order_once(2100);
    my ($last_hot)   = reverse map { $_->{index} } $receiver->log({ 'ce-partitionkey' => 'hot' });
    my ($last_other) = reverse map { $_->{index} } $receiver->log({ 'ce-partitionkey' => qr/^other/ });
    cmp_ok($last_other, '<', $last_hot, '... the others before it was through');
    my $hot_before = $receiver->count(sub { $_->{headers}{'ce-partitionkey'}[0] eq 'hot' && $_->{index} < $last_other });
    note "$hot_before hot ones before the last other";
    cmp_ok($hot_before, '<', 1000, '... long before');
    fresh();
};

subtest 'events of one transaction are not mixed up' => sub {
    my @ids = publish($node, n => 100, id => 'transaction');
    $receiver->wait_requests(100, answered => 1);
    wait_drained($node);
    one_at_a_time_in_order_once(100);
    is_deeply([ $receiver->ids ], \@ids, '... exactly as inserted');
    fresh();
};

# ---------------------------------------------------------------------------------------------------------
# Failures

for my $how ([ 500, 'fails' ], [ 503, 'cannot be taken now' ])
{
    my ($status, $what) = @$how;
    subtest "an event that $what ($status) holds its successors, and only those" => sub {
        reload($node, 'outbox.ordering' => 'aggregate', 'outbox.poll_interval' => '1h');
        my $rule = $receiver->rule(with => { 'ce-type' => '^poison$' }, status => $status);
        my @ids = publish($node, id => 'A', event => 'before', n => 3);
        push @ids, publish($node, id => 'A', event => 'poison');
        push @ids, publish($node, id => 'A', event => 'after', n => 30);
        my @others = publish($node, aggregates => 20, n => 60, event => 'other');
        $receiver->wait_requests(60, { 'ce-type' => 'other' }, desc => 'other aggregates go on');
        $receiver->wait_requests(2, { 'ce-type' => 'poison' }, desc => 'the failing one is tried again, without a new event');
        push @ids, publish($node, id => 'A', event => 'later', n => 5);
        publish($node, id => 'marker');
        $receiver->wait_requests(1, { 'ce-partitionkey' => 'marker' }, desc => 'and others go on');
        is($receiver->count({ 'ce-type' => qr/after|later/ }), 0, 'its successors wait, also those that came later');
        is(event_row($node, $ids[3])->{processed_at}, undef, 'it is not given up');
        is(event_row($node, $_)->{state}, 'waiting', 'a successor is waiting') for @ids[ 4, 33 ];

        # Order is in the table: it survives a restart, on the way to another number of workers.
        set_conf($node, 'outbox.workers' => $status == 500 ? 2 : 4);
        $node->restart;
        push @ids, publish($node, id => 'A', event => 'later', n => 5);
        my $tries = $receiver->count({ 'ce-type' => 'poison' });
        $receiver->wait_requests($tries + 1, { 'ce-type' => 'poison' }, desc => 'it is tried again after a restart');
        is($receiver->count({ 'ce-type' => qr/after|later/ }), 0, '... and its successors still wait');

        $receiver->remove_rule($rule);
        $receiver->wait_requests(@ids + @others + 1, sub { $_->{status} == 200 }, desc => 'when it succeeds, all go');
        wait_drained($node);
        is_deeply([ $receiver->ids({ 'ce-partitionkey' => 'A' }) ], \@ids, '... in order');
        is_deeply([ $receiver->overlaps_per_aggregate ], [], '... one at a time');
        is_deeply([ $receiver->duplicates(sub { $_->{status} == 200 }) ], [], '... and none twice');
        fresh();
    };
}

subtest 'many aggregates that fail at random do not mix up their order' => sub {
    $receiver->default(delay_ms => [ 0, 5 ]);
    $receiver->rule(chance => 0.3, status => [ 500, 404, 408 ]);
    publish($node, n => 600, aggregates => 30);
    publish($node, n => 30, aggregates => 30) for 1 .. 5;
    $receiver->wait_requests(750, sub { ($_->{status} // 0) == 200 }, desc => 'all arrive in the end');
    wait_drained($node);
    is_deeply([ $receiver->overlaps_per_aggregate ], [], '... one at a time');
    is_deeply([ $receiver->duplicates(sub { $_->{status} == 200 }) ], [], '... none twice');
    my (%last, @wrong);
    for my $e ($receiver->log)
    {
        my ($aggregate, $seq) = ($receiver->aggregate($e), 0 + $receiver->sequence($e));
        push @wrong, "$aggregate: $seq after $last{$aggregate}" if $seq < ($last{$aggregate} // 0);
        $last{$aggregate} = $seq;
    }
    is_deeply(\@wrong, [], '... each only when the one before was through');
    fresh();
};

subtest 'a dead letter lets its successors go' => sub {
    reload($node, 'outbox.max_attempts' => 3);
    $receiver->rule(with => { 'ce-type' => '^poison$' }, status => 400);
    my @ids = (publish($node, id => 'D', event => 'poison'), publish($node, id => 'D', event => 'fine', n => 40));
    $receiver->wait_requests(40, { 'ce-type' => 'fine' });
    wait_drained($node);
    is(count_dead($node), 1, 'one dead letter');
    is(event_row($node, $ids[0])->{attempts}, 3, '... after three attempts');
    is_deeply([ map { $receiver->event_id($_) } $receiver->log ], [ @ids[ 0, 0, 0 ], @ids[ 1 .. 40 ] ], 'three attempts, then the others in order');
    sql('DELETE FROM outbox_events WHERE retry_after = \'infinity\'');
    reload($node, 'outbox.max_attempts' => 100_000);
    fresh();
};

subtest 'without ordering an event that fails holds up nothing' => sub {
    reload($node, 'outbox.ordering' => 'none');
    my $rule = $receiver->rule(with => { 'ce-type' => '^poison$' }, status => 500);
    my @ids = publish($node, id => 'N', event => 'poison');
    $receiver->wait_requests(2, { 'ce-type' => 'poison' });
    push @ids, publish($node, id => 'N', event => 'after', n => 50);
    $receiver->wait_requests(50, { 'ce-type' => 'after' }, desc => 'its successors do not wait');
    is(event_row($node, $ids[0])->{processed_at}, undef, '... though it has not succeeded');
    $receiver->remove_rule($rule);
    wait_drained($node);
    is_deeply([ sort $receiver->ids ], [ sort @ids ], '... and it arrives, too');
    is_deeply([ $receiver->duplicates({ 'ce-type' => 'after' }) ], [], '... nothing twice');
    fresh();

    # What was held under one rule must not be forgotten under the other.
    reload($node, 'outbox.ordering' => 'aggregate');
    $rule = $receiver->rule(with => { 'ce-type' => '^poison$' }, status => 500);
    @ids = publish($node, id => 'N', event => 'poison');
    $receiver->wait_requests(2, { 'ce-type' => 'poison' });
    push @ids, publish($node, id => 'N', event => 'after', n => 50);
    wait_sql($node, 'postgres', q(SELECT count(*) FROM outbox_events WHERE retry_after = '-infinity'), 50, desc => '50 wait behind a failing one');
    reload($node, 'outbox.ordering' => 'none');
    $receiver->remove_rule($rule);
    $receiver->wait_requests(50, { 'ce-type' => 'after' }, desc => 'ordering switched off: what waited is not forgotten');
    wait_drained($node);
    reload($node, 'outbox.ordering' => 'aggregate');
    fresh();
};

# ---------------------------------------------------------------------------------------------------------
# Late commits

subtest 'a transaction that commits late, with lower numbers, is not overlooked' => sub {
    my %session = map { $_ => $node->background_psql('postgres') } 1 .. 4;
    my (@late, $n);
    for my $i (sort keys %session)
    {
        $session{$i}->query_safe('BEGIN');
        for my $aggregate ('same', "own$i")
        {
            push @late, $session{$i}->query_safe(
                "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '$aggregate', 'late', '{}') RETURNING id");
        }
        $n += publish($node, id => 'same', event => 'early');
        $n += publish($node, n => 300, aggregates => 100, event => 'early');
    }
    $receiver->wait_requests($n, { 'ce-type' => 'early' }, desc => 'nobody waits for open transactions');
    wait_drained($node);
    is($receiver->count({ 'ce-type' => 'late' }), 0, '... of which nothing is sent');
    for my $i (reverse sort keys %session)
    {
        $session{$i}->query_safe('COMMIT');
        $receiver->wait_requests(1, { 'ce-type' => 'late', 'ce-partitionkey' => "own$i" }, desc => "it arrives when transaction $i commits");
        $session{$i}->quit;
    }
    $receiver->wait_requests(8, { 'ce-type' => 'late' });
    wait_drained($node);
    is_deeply([ sort $receiver->ids({ 'ce-type' => 'late' }) ], [ sort @late ], 'all of them arrived');
    is_deeply([ $receiver->duplicates ], [], '... once');
    is_deeply([ $receiver->overlaps_per_aggregate ], [], '... one at a time');
    fresh();
};

is(sql('SELECT state FROM outbox_status'), 'ok', 'the status is ok in the end');

done_testing();
