// The records of `foliomem bench languages` in Java: arguments are the records and the rounds. Each round replaces a
// quarter of the records and reads others at random; the printed total depends on all of them.
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;

public class Records {
    static final String[] WORDS = {"north", "river", "stone", "market", "winter", "copper", "garden", "silver",
        "harbour", "meadow", "lantern", "orchard", "thunder", "village", "whisper", "yellow"};
    static long seed = 1;
    static long total = 0;

    static final class Entry {
        final String name = WORDS[random(16)] + "-" + WORDS[random(16)] + "-" + random(100000);
        final int[] counts = new int[8];
        final int sum;

        Entry() {
            for (int i = 0; i < counts.length; i++) {
                counts[i] = random(1000);
            }
            sum = Arrays.stream(counts).sum();
        }

        void verify() {
            if (Arrays.stream(counts).sum() != sum) {
                throw new IllegalStateException("a record has changed: " + name);
            }
        }
    }

    static int random(int below) {
        seed = seed * 16807 % 2147483647;
        return (int) (seed % below);
    }

    static void add(long number) {
        total = (total * 31 + number) % 2147483647;
    }

    static void replace(List<Entry> entries, int i) {
        Entry old = entries.get(i);
        old.verify();
        entries.set(i, new Entry());
        List<String> parts = Arrays.asList(old.name.split("-"));
        Collections.reverse(parts);
        add(String.join("+", parts).length());
    }

    public static void main(String[] arguments) {
        int count = Integer.parseInt(arguments[0]);
        int rounds = Integer.parseInt(arguments[1]);
        List<Entry> entries = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            entries.add(new Entry());
        }
        for (int round = 0; round < rounds; round++) {
            int start = random(count);
            for (int k = 0; k < count / 4; k++) {
                replace(entries, (start + k) % count);
            }
            for (int k = 0; k < count / 16; k++) {
                add(entries.get(random(count)).sum);
            }
        }
        for (Entry entry : entries) {
            entry.verify();
            add(entry.sum + entry.name.length());
        }
        System.out.println(total);
    }
}
