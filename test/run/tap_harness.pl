#!/usr/bin/perl
# Runs TAP-producing files and writes down exact counts, one line a file: "passed failed skipped name".
#
#     tap_harness.pl --results FILE [--jobs N] [--timeout SECONDS] [--lib DIR]... [--exec WORD]... FILE...
#
# A file is run by perl, or by the command whose words are given with --exec=. Nothing in a file's favour is assumed: a missing
# plan, tests that never ran, a bad exit or a file cut off by the timeout each count as failed.
# Knows nothing of PostgreSQL; starts and stops nothing but the files.
use strict;
use warnings;

use Getopt::Long;
use TAP::Harness;

my ($results, @lib, @exec);
my ($jobs, $timeout) = (1, 300);
GetOptions(
    'results=s' => \$results,
    'jobs=i'    => \$jobs,
    'timeout=i' => \$timeout,
    'lib=s'     => \@lib,
    'exec=s'    => \@exec,
) or exit 2;
die "tap_harness.pl: --results FILE is missing\n" unless defined $results;
die "tap_harness.pl: no files\n"                  unless @ARGV;

open(my $out, '>>', $results) or die "tap_harness.pl: $results: $!\n";
$out->autoflush(1);
STDOUT->autoflush(1);

@exec = ($^X, map { "-I$_" } @lib) unless @exec;

my $harness = TAP::Harness->new({
    jobs     => $jobs,
    timer    => 1,
    failures => 1,
    color    => -t STDOUT ? 1 : 0,
    exec     => sub {
        my (undef, $file) = @_;
        return ['timeout', '--foreground', '--kill-after=20', $timeout, @exec, $file];
    },
});
$harness->callback(after_test => sub {
    my ($job, $parser) = @_;
    printf {$out} "%d %d %d %s\n", counts($parser), $job->[0];
});

my $aggregate = $harness->runtests(@ARGV);
print {$out} "end\n";
exit($aggregate->all_passed ? 0 : 1);

sub counts
{
    my ($parser) = @_;

    my $skipped = $parser->skipped;
    my $passed  = $parser->actual_passed;
    my $failed  = $parser->failed;
    my $never_ran = ($parser->tests_planned // 0) - $parser->tests_run;
    $failed += $never_ran if $never_ran > 0;
    my $broken = $parser->exit || $parser->wait || $parser->parse_errors
      || (!defined $parser->skip_all && !$parser->tests_run);
    $failed = 1 if $broken && !$failed;
    return ($passed - $skipped, $failed, $skipped);
}
