# Figures to text: medians, percentiles, the table for people and the JSON for programs.
package Bench::Report;

use strict;
use warnings;

use JSON::PP;
use POSIX ();

sub median {
    my @sorted = sort { $a <=> $b } @_;
    return ($sorted[ $#sorted / 2 ] + $sorted[ @sorted / 2 ]) / 2;
}

# By nearest rank, of sorted values.
sub percentile {
    my ($percent, $sorted) = @_;
    die "no values\n" if !@$sorted;
    my $rank = POSIX::ceil($percent / 100 * @$sorted);
    return $sorted->[ $rank < 1 ? 0 : $rank - 1 ];
}

sub rounded { my ($value, $digits) = @_; return 0 + sprintf "%.${digits}f", $value }

sub json { my ($result) = @_; return JSON::PP->new->canonical->pretty->encode($result) }

sub table {
    my ($result) = @_;
    return join "\n", grep { $_ ne '' } machine($result), throughput($result), latency($result),
      memory($result), writers($result), targets($result), verdict($result);
}

sub machine {
    my ($result) = @_;
    my ($m, $p) = @$result{qw(machine parameters)};
    return
        "outbox bench: $p->{events} committed events of $p->{payload_bytes} bytes, one POST each, to nginx here\n"
      . "$m->{processors} x $m->{processor}, Linux $m->{kernel}, load $m->{load_at_start} at the start\n"
      . "PostgreSQL $m->{postgresql}, outbox $m->{outbox}, libcurl $m->{libcurl}, nginx $m->{nginx}, "
      . "$m->{compiler}\n"
      . "fsync $m->{fsync}, synchronous_commit $m->{synchronous_commit}, $p->{aggregates} aggregates\n"
      . join '', map { noise($_, $m->{others_busy}{$_}) } grep { $m->{others_busy}{$_} } qw(throughput latency writers);
}

sub noise {
    my ($phase, $busy) = @_;
    return sprintf "others kept %.2f processors busy (most: %.2f) during %s%s\n", @$busy{qw(median max)}, $phase,
      $busy->{noisy} ? ': NOISY, do not quote its figures' : '';
}

sub throughput {
    my ($result) = @_;
    my ($runs, $ratio) = @$result{qw(throughput ratios)};
    my @names = (
        [ a  => 'ceiling',          'libcurl multi, 64 connections, from memory' ],
        [ b  => 'hand_relay',       'hand-written relay, sequential' ],
        [ c1 => 'outbox_1_worker',  'outbox, 1 worker' ],
        [ c2 => 'outbox_2_workers', 'outbox, 2 workers' ]);
    my $text = sprintf "%-49s %9s %7s %7s   %s\n", 'throughput', 'events/s', 'of a', 'x b', 'rounds';
    for my $name (@names) {
        my ($key, $run, $label) = @$name;
        next if !$runs->{$run};
        $text .= sprintf "  %-3s %-43s %9.0f %7.3f %7.1f   %s\n", $key, $label, $runs->{$run}{rate},
          $ratio->{"$key/a"} // 1, $ratio->{"$key/b"} // 1,
          join ' ', map { sprintf '%.0f', $_ } @{ $runs->{$run}{rounds} };
    }
    $text .= sprintf "      c2/c1 %.2f\n", $ratio->{'c2/c1'} if defined $ratio->{'c2/c1'};
    return $text;
}

sub latency {
    my ($result) = @_;
    my $p = $result->{parameters};
    my $text = sprintf "%-49s %9s %9s %9s\n", "commit to arrival at $p->{latency_rate}/s, ms", 'p50', 'p99', 'max';
    for my $relay ([ outbox => 'outbox, 1 worker' ], [ hand_relay => 'hand-written, NOTIFY' ]) {
        my ($key, $label) = @$relay;
        my $run = $result->{latency}{$key} or next;
        for my $from ([ after_commit => 'COMMIT returned' ], [ before_commit => 'COMMIT was sent' ]) {
            $text .= sprintf "  d   %-43s %9.3f %9.3f %9.3f\n", "$label, since $from->[1]",
              @{ $run->{ $from->[0] } }{qw(p50_ms p99_ms max_ms)};
        }
    }
    return $text;
}

sub memory {
    my ($result) = @_;
    my $memory = $result->{memory} or return '';
    return sprintf "%-49s %9s\n  e   %-43s %9.1f\n", 'memory of a worker after the runs', 'MB',
      'private, largest of ' . @{ $memory->{private_kb} } . ' readings', $memory->{max_private_kb} / 1024;
}

sub writers {
    my ($result) = @_;
    my $writers = $result->{writers} or return '';
    my $text = sprintf "%-49s %9s %9s %7s\n", 'what the trigger costs the writer, inserts/s', 'with', 'without',
      'ratio';
    for my $clients (sort { $a <=> $b } keys %$writers) {
        my $run = $writers->{$clients};
        $text .= sprintf "  f   %-43s %9.0f %9.0f %7.3f\n",
          $clients . ($clients == 1 ? ' client' : ' clients') . ', relay stopped',
          $run->{with}{tps}, $run->{without}{tps}, $run->{ratio};
    }
    return $text;
}

sub targets {
    my ($result) = @_;
    my $text = @{ $result->{targets} } ? "targets\n" : '';
    for my $target (@{ $result->{targets} }) {
        $text .= sprintf "      %-43s %9.3f   %s\n", $target->{name}, $target->{value},
          $target->{met} ? 'met' : 'missed';
    }
    return $text;
}

sub verdict {
    my ($result) = @_;
    return join '', map { "BROKEN: $_\n" } @{ $result->{broken} };
}

1;
