# kill -9 of any process: every committed event arrives, nothing else does, and the order holds.

use strict;
use warnings;

use IPC::Run ();
use OutboxTest;
use PostgreSQL::Test::Utils ();
use Test::More;

my $receiver = start_receiver(seed => 220);
my $node     = new_node('main', receiver => $receiver, conf => { 'outbox.retention' => -1 });
create_extension($node);

# Four clients, each with aggregates of its own, so that events of one aggregate commit in the order of seq.
# One transaction in five rolls back.
my $script = PostgreSQL::Test::Utils::tempdir() . '/writer.pgbench';
PostgreSQL::Test::Utils::append_to_file($script, <<'SQL');
\set aggregate :client_id * 10 + random(0, 9)
\set events random(1, 3)
\set fate random(1, 5)
BEGIN;
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'order', :aggregate, CASE WHEN :fate = 1 THEN 'ghost' ELSE 'real' END, '{}' FROM generate_series(1, :events);
\if :fate = 1
ROLLBACK;
\else
COMMIT;
\endif
SQL

sub start_writer
{
    my @command = ('pgbench', '-n', '-c', 4, '-R', 300, '-T', 3600, '-f', $script, $node->connstr('postgres'));
    return IPC::Run::start(\@command, '<', \undef, '>', \my $out, '2>', \my $err);
}

sub pid_of
{
    my ($victim) = @_;
    return $victim eq 'launcher' ? launcher_pid($node) : (worker_pids($node, 'postgres'))[0];
}

sub kill_it
{
    my ($victim) = @_;
    if ($victim eq 'postmaster')
    {
        my $pid = postmaster_pid($node);
        $node->kill9;
        wait_for('the postmaster is gone', sub { !kill 0, $pid });
        return wait_for('the server can be started again', sub { $node->start(fail_ok => 1) });
    }
    my $offset = log_offset($node);
    my $pid    = pid_of($victim);
    ok($pid && kill('KILL', $pid), "killed the $victim");
    wait_log($node, qr/ready to accept connections/, $offset, desc => 'the server restarts by itself');
    return;
}

sub committed { return split /\n/, $node->safe_psql('postgres', 'SELECT id FROM outbox_events') }

sub all_well
{
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    is_deeply([ sort $receiver->ids ], [ sort { $a cmp $b } committed() ], 'every committed event arrived, and nothing else');
    is_deeply([ $receiver->out_of_order ],           [], 'in order of first arrival');
    is_deeply([ $receiver->overlaps_per_aggregate ], [], 'one at a time per aggregate');
    is(count_delivered($node), scalar(my @all = committed()), 'all recorded as delivered');
    return;
}

$receiver->rule(delay_ms => [ 1, 20 ]);
for my $victim (qw(worker launcher postmaster worker postmaster))
{
    subtest "kill -9 of the $victim under load" => sub {
        wait_workers($node, 1);
        my $before = $receiver->requests;
        my $writer = start_writer();
        $receiver->wait_requests($before + 300);
        kill_it($victim);
        $writer->finish;
        wait_drained($node, timeout => 30);
        all_well();
    };
}
is($receiver->count({ 'ce-type' => 'ghost' }), 0, 'nothing of a rolled back transaction arrived');

subtest 'what was recorded and flushed before the crash is not sent again' => sub {
    $receiver->clear_log;
    $receiver->clear_rules;
    my @ids = publish($node, n => 300, aggregates => 50);
    wait_drained($node);
    $node->safe_psql('postgres', 'CREATE TABLE mark AS SELECT pg_current_wal_insert_lsn() AS lsn');
    wait_sql($node, 'postgres', 'SELECT pg_current_wal_flush_lsn() >= lsn FROM mark', 't', desc => 'the results are on disk');
    kill_it('worker');
    wait_workers($node, 1);
    push @ids, publish($node, id => 'last');
    wait_drained($node);
    is_deeply([ sort $receiver->ids ],  [ sort @ids ], 'all arrived');
    is_deeply([ $receiver->duplicates ], [], 'nothing twice');
};

subtest 'kill -9 of the postmaster while requests hang' => sub {
    $receiver->clear_log;
    my $rule = $receiver->hang;
    my @ids = publish($node, n => 100, aggregates => 100);
    $receiver->wait_hung(64);
    my @hung = map { $receiver->event_id($_) } $receiver->log;
    kill_it('postmaster');
    $receiver->remove_rule($rule);
    $receiver->release;
    wait_drained($node);
    is_deeply([ sort $receiver->ids ], [ sort @ids ], 'all arrived');
    is_deeply([ grep { !/\(2 times\)$/ } $receiver->duplicates ], [], 'nothing more than twice');
    my %hung = map { $_ => 1 } @hung;
    is_deeply([ grep { !$hung{ s/ .*//r } } $receiver->duplicates ], [], 'only what was in flight is sent again');
    is($node->safe_psql('postgres', 'SELECT sum(attempts) FROM outbox_events'), 0, 'no attempt counted');
};

done_testing();
