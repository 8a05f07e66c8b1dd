# Statistics that are wrong must not change how the relay reads and records: with those of an empty table, and with those of
# a full one, a claim or a record planned as a join over everything would make each event dearer, not just some.
use strict;
use warnings;

use Test::More;

use OutboxTest;

my $receiver = start_receiver();
my $node     = new_node('plans', receiver => $receiver, conf => { 'autovacuum' => 'off', 'outbox.retention' => -1 });
create_extension($node);

# Buffers that the delivery of $n events touched, per event.
sub buffers_per_event {
    my ($n) = @_;
    my $before = buffers();
    $receiver->clear_log;
    publish($node, n => $n, aggregates => 500);
    wait_drained($node);
    # The worker hands in its statistics when it has nothing to do.
    my $touched = 0;
    wait_for('the worker handed in its statistics', sub {
        my $delivered = $node->safe_psql('postgres', 'SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = $$outbox_events$$');
        return $delivered >= delivered();
    });
    return (buffers() - $before) / $n;
}

sub buffers {
    return $node->safe_psql('postgres',
        'SELECT sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::bigint FROM pg_statio_user_tables WHERE relname = $$outbox_events$$');
}

sub delivered {
    return $node->safe_psql('postgres', 'SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL');
}

$node->safe_psql('postgres', 'ANALYZE outbox_events');
my $on_empty = buffers_per_event(2000);
cmp_ok($on_empty, '>', 0, 'the events were delivered under the statistics of an empty table');

publish($node, n => 8_000, aggregates => 500);
wait_drained($node);
$node->safe_psql('postgres', 'ANALYZE outbox_events');
my $on_full = buffers_per_event(2000);
diag("buffers an event: $on_empty under the statistics of an empty table, $on_full under those of a full one");
cmp_ok($on_full, '<=', 2 * $on_empty, 'statistics of a full table make no event dearer');

$node->safe_psql('postgres', 'BEGIN; DELETE FROM outbox_events; COMMIT; VACUUM ANALYZE outbox_events');
my $on_emptied = buffers_per_event(5000);
diag("buffers an event: $on_emptied under the statistics of an emptied table");
cmp_ok($on_emptied, '<=', 2 * $on_empty, 'statistics of an emptied table make no event dearer');

done_testing();
