# The records of `foliomem bench languages` in Perl: arguments are the records and the rounds. Each round replaces a
# quarter of the records and reads others at random; the printed total depends on all of them.
use strict;
use warnings;
use integer;

my ($count, $rounds) = @ARGV;
my @words = qw(north river stone market winter copper garden silver
               harbour meadow lantern orchard thunder village whisper yellow);
my ($seed, $total) = (1, 0);

sub random {
    my ($below) = @_;
    $seed = $seed * 16807 % 2147483647;
    return $seed % $below;
}

sub make {
    my $name = $words[random(16)] . "-" . $words[random(16)] . "-" . random(100000);
    my ($sum, @counts) = (0);
    for (1 .. 8) {
        push @counts, random(1000);
        $sum += $counts[-1];
    }
    return {name => $name, counts => \@counts, sum => $sum};
}

sub verify {
    my ($record) = @_;
    my $sum = 0;
    $sum += $_ for @{$record->{counts}};
    die "a record has changed: $record->{name}" if $sum != $record->{sum};
}

sub add { $total = ($total * 31 + $_[0]) % 2147483647 }

my @records;
push @records, make() for 1 .. $count;
for (1 .. $rounds) {
    my $start = random($count);
    for my $k (0 .. $count / 4 - 1) {
        my $i = ($start + $k) % $count;
        my $old = $records[$i];
        verify($old);
        $records[$i] = make();
        add(length join "+", reverse split /-/, $old->{name});
    }
    add($records[random($count)]{sum}) for 1 .. $count / 16;
}
for my $record (@records) {
    verify($record);
    add($record->{sum} + length $record->{name});
}
print "$total\n";
