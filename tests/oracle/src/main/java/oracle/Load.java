package oracle;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * A load of several producers, each sending one message after the other in a thread and over connections of its own, and
 * what it took. Unlike {@link Produce} it prints nothing while it sends.
 *
 * <p>The producers stay connected and warm between intervals: each line on stdin, a number of seconds, asks for one
 * interval, which is answered by one JSON document. With {@code --seconds} there is one interval, and stdin is not read.
 */
final class Load {
    private final Args args;
    private final String topic;
    private final byte[] body;
    private final long rate;
    private final List<DefaultMQProducer> producers = new ArrayList<>();
    private final List<MessageQueue> queues;
    private final ExecutorService threads;

    private Load(Args args) throws Exception {
        this.args = args;
        this.topic = args.need("topic");
        this.body = new byte[args.integer("body", 1024)];
        this.rate = args.number("rate", 0);
        new Random(args.number("seed", 1)).nextBytes(body);
        Produce.createTopic(args, topic);
        for (int number = 0; number < args.integer("producers", 4); number++) {
            producers.add(producer(number));
        }
        queues = new ArrayList<>(producers.get(0).fetchPublishMessageQueues(topic));
        Collections.sort(queues);
        threads = Executors.newFixedThreadPool(producers.size());
    }

    static void main(String[] argv) throws Exception {
        Load load = new Load(new Args(argv, "namesrv", "topic", "queues", "producers", "seconds", "rate", "body", "seed",
            "timeout-ms", "attr"));
        if (load.args.has("seconds")) {
            load.interval(Double.parseDouble(load.args.need("seconds")));
        } else {
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                load.interval(Double.parseDouble(line.trim()));
            }
        }
        load.threads.shutdown();
        load.producers.forEach(DefaultMQProducer::shutdown);
    }

    private DefaultMQProducer producer(int number) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("oracle-load");
        producer.setNamesrvAddr(args.need("namesrv"));
        producer.setInstanceName("oracle-load-" + number + "-" + System.nanoTime());  // a connection of its own
        producer.setRetryTimesWhenSendFailed(0);
        producer.setSendMsgTimeout(args.integer("timeout-ms", 5000));
        producer.setMaxMessageSize(64 << 20);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        return producer;
    }

    private void interval(double seconds) throws Exception {
        long start = System.nanoTime();
        long stop = start + (long) (seconds * 1e9);
        List<Future<Latencies>> parts = new ArrayList<>();
        for (int number = 0; number < producers.size(); number++) {
            int mine = number;
            parts.add(threads.submit(() -> send(mine, start, stop)));
        }
        Latencies all = new Latencies();
        for (Future<Latencies> part : parts) {
            all.addAll(received(part));
        }
        Records.print(document(all, (System.nanoTime() - start) / 1e9));
    }

    /** The first failed send ends the program: what is measured afterwards would not be the same load. */
    private static Latencies received(Future<Latencies> part) throws InterruptedException {
        try {
            return part.get();
        } catch (ExecutionException e) {
            System.err.println("oracle: stopped after a failed send: " + e.getCause());
            System.exit(3);
            throw new AssertionError(e);
        }
    }

    /** One producer's sends. With a rate a send that is late is not left out, and the next ones follow at once. */
    private Latencies send(int number, long start, long stop) throws Exception {
        DefaultMQProducer producer = producers.get(number);
        Latencies latencies = new Latencies();
        for (long sent = 0; ; sent++) {
            long due = rate > 0 ? start + sent * 1_000_000_000L / rate : start;
            if (due >= stop || System.nanoTime() >= stop) {
                return latencies;
            }
            long ahead = due - System.nanoTime();
            if (ahead > 0) {
                Thread.sleep(ahead / 1_000_000, (int) (ahead % 1_000_000));
            }
            MessageQueue queue = queues.get((int) ((number + sent) % queues.size()));
            long begin = System.nanoTime();
            producer.send(new Message(topic, body), queue);
            latencies.add(System.nanoTime() - begin);
        }
    }

    private Map<String, Object> document(Latencies latencies, double seconds) {
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("producers", producers.size());
        out.put("body_bytes", body.length);
        out.put("rate", rate);
        out.put("seconds", seconds);
        out.put("sends", latencies.count);
        out.put("sends_per_s", latencies.count / seconds);
        out.put("mib_per_s", latencies.count * (double) body.length / seconds / (1 << 20));
        latencies.sort();
        out.put("p50_us", latencies.quantile(0.5));
        out.put("p99_us", latencies.quantile(0.99));
        out.put("p999_us", latencies.quantile(0.999));
        out.put("max_us", latencies.quantile(1));
        return out;
    }

    /** Every latency, in nanoseconds: a few MiB, and no bins that round. */
    private static final class Latencies {
        private long[] nanos = new long[1 << 16];
        private int count;

        void add(long one) {
            if (count == nanos.length) {
                nanos = Arrays.copyOf(nanos, 2 * count);
            }
            nanos[count++] = one;
        }

        void addAll(Latencies others) {
            for (int i = 0; i < others.count; i++) {
                add(others.nanos[i]);
            }
        }

        void sort() {
            Arrays.sort(nanos, 0, count);
        }

        /** The smallest latency that a share of all does not exceed, in microseconds; null when there is none. */
        Long quantile(double share) {
            return count == 0 ? null : nanos[Math.max(0, (int) Math.ceil(share * count) - 1)] / 1000;
        }
    }
}
