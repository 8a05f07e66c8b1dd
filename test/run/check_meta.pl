#!/usr/bin/perl
# Checks META.json against what PGXN's meta spec 1.0.0 requires and against the files it names.
# Prints each finding on a line; silent when all is well.
use strict;
use warnings;

use JSON::PP;

my $file = shift // 'META.json';
my @findings;

sub check($$) { my ($ok, $what) = @_; push @findings, $what unless $ok }

sub text
{
    my ($path) = @_;
    open(my $in, '<', $path) or return undef;
    local $/;
    return scalar <$in>;
}

my $meta = eval { decode_json(text($file)) };
if (ref $meta eq 'HASH')
{
    my $version = qr/^\d+\.\d+\.\d+(-[A-Za-z][0-9A-Za-z-]*)?$/;
    for my $key (qw(name version abstract maintainer license provides meta-spec))
    {
        check(defined $meta->{$key}, "$key is missing");
    }
    my $spec = $meta->{'meta-spec'} // {};
    check(($spec->{version} // '') eq '1.0.0', 'meta-spec.version is not 1.0.0');
    check(($meta->{name} // '') =~ /^[^\s\/\\]{2,}$/, 'name is not a term');
    check(($meta->{version} // '') =~ $version, 'version is not a semantic version');
    check(keys %{ $meta->{provides} // {} }, 'provides is empty');
    for my $name (sort keys %{ $meta->{provides} // {} })
    {
        my $part = $meta->{provides}{$name};
        check(($part->{version} // '') =~ $version, "provides.$name.version is not a semantic version");
        for my $key (grep { defined $part->{$_} || $_ eq 'file' } qw(file docfile))
        {
            my $path = $part->{$key} // '';
            check(-f $path, "provides.$name.$key names '$path', which is not there");
        }
        my $control = text("$name.control") // '';
        my ($default) = $control =~ /^default_version\s*=\s*'([^']*)'/m;
        check(!defined $default || $default eq ($part->{version} // ''),
            "provides.$name.version is not the default_version of $name.control");
    }
    for my $phase (values %{ $meta->{prereqs} // {} })
    {
        for my $kind (values %$phase)
        {
            check(!ref $_ && /^(0|[<>=!, ]*\d+\.\d+\.\d+.*)$/, "prereqs: '$_' is not a version range")
              for values %$kind;
        }
    }
    check(($meta->{release_status} // 'stable') =~ /^(stable|testing|unstable)$/,
        'release_status is none of stable, testing, unstable');
}
else
{
    push @findings, "not a JSON object: " . ($@ || 'unreadable');
}

print "$file: $_\n" for @findings;
exit(@findings ? 1 : 0);
