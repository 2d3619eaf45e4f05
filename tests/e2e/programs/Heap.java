// A Java heap of about ARGV[0] thousand objects: built, partly replaced, walked at random; prints a checksum.
import java.util.ArrayList;
import java.util.HashMap;

public class Heap {
    static final String TEXT = "lorem ipsum dolor sit amet ".repeat(8);

    static final class Node {
        final int id;
        final byte[] body;
        Node next;

        Node(int id) {
            this.id = id;
            this.body = (id + ":" + TEXT).getBytes();
        }
    }

    public static void main(String[] args) throws Exception {
        int count = Integer.parseInt(args[0]) * 1000;
        ArrayList<Node> all = new ArrayList<>();
        HashMap<Integer, Node> index = new HashMap<>();
        for (int i = 0; i < count; i++) all.add(new Node(i));
        for (int i = 0; i < count; i += 5) all.set(i, new Node(i));
        for (int i = 0; i < count; i++) {
            all.get(i).next = all.get((int) ((i * 7919L + 13) % count));
            if (i % 3 == 0) index.put(i, all.get(i));
        }
        System.gc();
        long[] sums = new long[2];
        Thread[] threads = new Thread[2];
        for (int t = 0; t < 2; t++) {
            int half = t;
            threads[t] = new Thread(() -> {
                long sum = 0;
                Node at = all.get(half);
                for (int i = half; i < count; i += 2) {
                    Node o = i % 4 < 2 ? at : index.getOrDefault(i, all.get(i));
                    if (!new String(o.body).equals(o.id + ":" + TEXT)) throw new IllegalStateException("object " + o.id + " is damaged");
                    sum = (sum * 31 + o.id + o.body[i % o.body.length]) % 1000000007L;
                    at = at.next;
                }
                sums[half] = sum;
            });
            threads[t].start();
        }
        for (Thread t : threads) t.join();
        System.out.println("checksum " + sums[0] + " " + sums[1] + " " + index.size());
    }
}
