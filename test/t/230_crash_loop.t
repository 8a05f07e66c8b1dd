# A relay that crashes again and again does not keep the server down: it comes back at growing intervals.

use strict;
use warnings;

use OutboxTest;
use Test::More;

my $receiver = start_receiver();
my $node     = new_node('main', receiver => $receiver, conf => { 'outbox.retention' => -1 });
create_extension($node);

# Crash number n delays the workers 100 ms * 2 ** (n - 1), at most 30 s. Ten crashes of the worker would take these
# delays' sum, 80 s. The count does not ask who crashed: the last ones are crashes of the launcher, which has no delay.
use constant { WORKER_CRASHES => 7, ALL_CRASHES => 11, CAP_MS => 30_000 };

my (@delays, @ids);

sub nominal
{
    my ($n) = @_;
    my $ms = 100 * 2**($n - 1);
    return $ms < CAP_MS ? $ms : CAP_MS;
}

sub crash
{
    my ($n, $pid) = @_;
    my $offset = log_offset($node);
    ok($pid && kill('SEGV', $pid), 'SIGSEGV');
    my $line = qr/crash restart $n in a row, workers start in ([0-9]+) ms/;
    wait_log($node, $line, $offset, desc => 'the log says how long the workers wait');
    my ($ms) = log_since($node, $offset) =~ $line;
    push @delays, $ms;
    cmp_ok($ms // 'none', '<=', nominal($n), 'not longer than it should be');
    is($node->safe_psql('postgres', 'SELECT 1'), '1', 'the server is usable meanwhile');
    return;
}

for my $n (1 .. WORKER_CRASHES)
{
    subtest "crash $n" => sub {
        wait_workers($node, 1);
        crash($n, (worker_pids($node, 'postgres'))[0]);
        push @ids, publish($node, id => $n);
        # Without a worker, that is: on a slow machine a short delay may be over by now.
        is($node->safe_psql('postgres', q(SELECT count(*) FROM outbox_status WHERE state = 'ok' AND workers = 0)), 0, q(the status is not 'ok' meanwhile));
        wait_drained($node);
        is($node->safe_psql('postgres', qq(
            SELECT w.backend_start - l.backend_start >= interval '$delays[-1] ms'
            FROM pg_stat_activity w, pg_stat_activity l
            WHERE w.backend_type = 'outbox worker' AND l.backend_type = 'outbox launcher')), 't', 'the worker started after the delay');
    };
}

for my $n (WORKER_CRASHES + 1 .. ALL_CRASHES)
{
    subtest "crash $n" => sub {
        my $pid;
        wait_for('a launcher is there', sub { $pid = launcher_pid($node) });
        crash($n, $pid);
        is(scalar worker_pids($node), 0, 'no worker');
    };
}

note "delays: @delays";

# The delay runs from the moment of the crash; the log line comes after the recovery, which takes some of it.
my @slower = map { $delays[$_] - $delays[ $_ - 1 ] } 5 .. 8;
is(scalar(grep { $_ <= 0 } @slower), 0, 'the delays grow');
cmp_ok($delays[-1], '>', CAP_MS / 2, 'up to half a minute');

push @ids, publish($node, id => 'before the restart');
my $offset = log_offset($node);
$node->restart;
wait_drained($node, timeout => 20);
unlike(log_since($node, $offset), qr/crash restart/, 'a restart by hand begins anew');
is_deeply([ $receiver->ids ], \@ids, 'all arrived, in order');

done_testing();
