package oracle;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Base64;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.proxy.ProxyStartup;

/** The proxy in cluster mode, and the consumers of gRPC behind it. See README.md. */
public final class Proxy {
    private static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

    private Proxy() {
    }

    public static void main(String[] argv) {
        System.setOut(System.err);
        try {
            Map<String, String> options = new HashMap<>();
            for (int i = 1; i + 1 < argv.length; i += 2) {
                options.put(argv[i].substring(2), argv[i + 1]);
            }
            switch (argv[0]) {
                case "proxy":
                    proxy(options);
                    return;  // its threads keep the process alive
                case "simple":
                    simple(options);
                    break;
                case "grpc-push":
                    push(options);
                    break;
                default:
                    throw new IllegalArgumentException("no command " + argv[0]);
            }
        } catch (Throwable e) {
            e.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }

    private static void proxy(Map<String, String> options) throws Exception {
        Path config = Files.createTempFile("oracle-proxy", ".json");
        Files.writeString(config, "{\"rocketMQClusterName\":\"" + options.get("cluster") + "\",\"proxyMode\":\"cluster\","
            + "\"namesrvAddr\":\"" + options.get("namesrv") + "\",\"localServeAddr\":\"127.0.0.1\","
            + "\"grpcClientConsumerMinLongPollingTimeoutMillis\":500,"
            + "\"grpcServerPort\":" + options.get("port") + ",\"remotingListenPort\":" + options.get("remoting-port") + "}");
        ProxyStartup.main(new String[] {"-pc", config.toString()});
        OUT.println("READY");
    }

    private static ClientConfiguration at(Map<String, String> options) {
        return ClientConfiguration.newBuilder().setEndpoints(options.get("proxy")).enableSsl(false)
            .setRequestTimeout(Duration.ofSeconds(10)).build();
    }

    /**
     * Receives and acknowledges until --max different ones are, or --seconds have passed; of every --refuse-th the first time
     * not. A receive that finds nothing waits --await seconds, and a failed one ends it.
     */
    private static void simple(Map<String, String> options) throws Exception {
        long max = Long.parseLong(options.getOrDefault("max", "1000000000"));
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.parseLong(options.getOrDefault("seconds", "60")));
        Duration hidden = Duration.ofSeconds(Long.parseLong(options.getOrDefault("hidden", "10")));
        int refuse = Integer.parseInt(options.getOrDefault("refuse", "0"));
        Duration await = Duration.ofSeconds(Long.parseLong(options.getOrDefault("await", "5")));
        try (SimpleConsumer consumer = started(until, () -> ClientServiceProvider.loadService().newSimpleConsumerBuilder()
            .setClientConfiguration(at(options)).setConsumerGroup(options.get("group")).setAwaitDuration(await)
            .setSubscriptionExpressions(Collections.singletonMap(options.get("topic"), FilterExpression.SUB_ALL)).build())) {
            Set<String> taken = new HashSet<>();
            for (long seen = 0; taken.size() < max && System.nanoTime() < until; ) {
                Map<MessageView, CompletableFuture<Void>> given = new LinkedHashMap<>();
                for (MessageView message : consumer.receive(32, hidden)) {
                    boolean isRefused = refuse > 0 && message.getDeliveryAttempt() == 1 && seen++ % refuse == 0;
                    given.put(message, isRefused ? null : consumer.ackAsync(message));
                }
                for (Map.Entry<MessageView, CompletableFuture<Void>> one : given.entrySet()) {
                    if (one.getValue() != null) {
                        one.getValue().join();  // what is printed as consumed is acknowledged
                        taken.add(one.getKey().getMessageId().toString());
                    }
                    print(one.getKey(), one.getValue() != null);
                }
            }
        }
    }

    private static void push(Map<String, String> options) throws Exception {
        long max = Long.parseLong(options.getOrDefault("max", "1000000000"));
        CountDownLatch done = new CountDownLatch(1);
        AtomicLong taken = new AtomicLong();
        int refuse = Integer.parseInt(options.getOrDefault("refuse", "0"));
        AtomicLong seen = new AtomicLong();
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
        try (PushConsumer consumer = started(until, () -> ClientServiceProvider.loadService().newPushConsumerBuilder()
            .setClientConfiguration(at(options)).setConsumerGroup(options.get("group"))
            .setSubscriptionExpressions(Collections.singletonMap(options.get("topic"), FilterExpression.SUB_ALL))
            .setMessageListener(message -> {
                boolean isRefused = refuse > 0 && message.getDeliveryAttempt() == 1 && seen.getAndIncrement() % refuse == 0;
                print(message, !isRefused);
                if (!isRefused && taken.incrementAndGet() >= max) {
                    done.countDown();
                }
                return isRefused ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            }).build())) {
            done.await(Long.parseLong(options.getOrDefault("seconds", "60")), TimeUnit.SECONDS);
            Thread.sleep(2000);  // the last acknowledgements are on their way
        }
    }

    /** Starts a consumer: it gives the proxy three seconds for its first answer, which one that has just begun may not meet. */
    private static <T> T started(long until, Callable<T> start) throws Exception {
        while (true) {
            try {
                return start.call();
            } catch (IllegalStateException failed) {
                if (System.nanoTime() > until) {
                    throw failed;
                }
                System.err.println("again: " + failed.getMessage());
            }
        }
    }

    private static synchronized void print(MessageView message, boolean isTaken) {
        ByteBuffer body = message.getBody();
        byte[] data = new byte[body.remaining()];
        body.get(data);
        OUT.println("{\"msg_id\":\"" + message.getMessageId() + "\",\"topic\":\"" + message.getTopic() + "\",\"attempt\":"
            + message.getDeliveryAttempt() + ",\"consumed\":" + isTaken + ",\"body_base64\":\""
            + Base64.getEncoder().encodeToString(data) + "\"}");
    }
}
