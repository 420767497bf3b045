package oracle;

import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.BitSet;
import java.util.Collections;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** Clients, a name server and a broker, of whichever RocketMQ is on the class path: one source for 4.9 and 5.x. See README.md. */
public final class Clients {
    private static final List<String> ADDED_BY_CLIENT =
        List.of(MessageConst.PROPERTY_MIN_OFFSET, MessageConst.PROPERTY_MAX_OFFSET, MessageConst.PROPERTY_CONSUME_START_TIMESTAMP);

    private static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

    private Clients() {
    }

    public static void main(String[] argv) {
        System.setOut(System.err);  // libraries log there at times; stdout carries data
        try {
            String command = argv.length == 0 ? "" : argv[0];
            Map<String, List<String>> options = options(Arrays.copyOfRange(argv, Math.min(1, argv.length), argv.length));
            switch (command) {
                case "namesrv":
                    namesrv(options);
                    return;  // its threads keep the process alive
                case "broker":
                    broker(options);
                    return;
                case "push":
                    push(options);
                    break;
                case "lite-pull":
                    litePull(options);
                    break;
                case "view":
                    view(options);
                    break;
                case "judge":
                    judge(options);
                    break;
                default:
                    throw new IllegalArgumentException("no command " + command);
            }
        } catch (Throwable e) {
            e.printStackTrace();
            System.exit(1);
        }
        OUT.flush();
        System.exit(0);
    }

    private static void namesrv(Map<String, List<String>> options) throws Exception {
        NettyServerConfig netty = new NettyServerConfig();
        netty.setListenPort(Integer.parseInt(one(options, "port", "9876")));
        NamesrvController controller = new NamesrvController(new NamesrvConfig(), netty);
        if (!controller.initialize()) {
            throw new IllegalStateException("not initialized");
        }
        controller.start();
        OUT.println("READY");
    }

    /** A broker with small files, as that of `./oracle broker`; --set takes any property. A signal ends it well. */
    private static void broker(Map<String, List<String>> options) throws Exception {
        String address = "127.0.0.1";
        Properties said = new Properties();
        said.putAll(Map.of("storePathRootDir", one(options, "store", null), "namesrvAddr", one(options, "namesrv", null),
            "brokerName", one(options, "name", "broker-a"), "brokerClusterName", one(options, "cluster", "cluster-a"),
            "brokerIP1", address, "brokerIP2", address, "bindAddress", address, "listenPort", one(options, "port", "10911")));
        said.putAll(Map.of("mappedFileSizeCommitLog", "1048576", "mappedFileSizeConsumeQueue", "20000", "maxHashSlotNum", "1000",
            "maxIndexNum", "4000", "fileReservedTime", "1000000", "cleanFileForciblyEnable", "false",
            "brokerFastFailureEnable", "false", "osPageCacheBusyTimeOutMills", "10000"));
        said.setProperty("storePathCommitLog", one(options, "store", null) + "/commitlog");
        for (String pair : options.getOrDefault("set", List.of())) {
            said.setProperty(pair.substring(0, pair.indexOf('=')), pair.substring(pair.indexOf('=') + 1));
        }
        // Said with each request; a name server takes one that does not say it for a broker of 3.0, which sends no topics.
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        System.setProperty("rocketmq.broker.diskSpaceWarningLevelRatio", "0.99");
        System.setProperty("rocketmq.broker.diskSpaceCleanForciblyRatio", "0.99");
        MessageStoreConfig store = new MessageStoreConfig();
        BrokerConfig broker = new BrokerConfig();
        NettyServerConfig netty = new NettyServerConfig();
        for (Object config : new Object[] {store, broker, netty}) {
            MixAll.properties2Object(said, config);
        }
        store.setHaListenPort(netty.getListenPort() + 1);
        BrokerController controller = new BrokerController(broker, netty, new NettyClientConfig(), store);
        controller.getConfiguration().registerConfig(said);
        if (!controller.initialize()) {
            throw new IllegalStateException("not initialized");
        }
        Runtime.getRuntime().addShutdownHook(new Thread(controller::shutdown));
        controller.start();  // name servers have answered when it returns
        OUT.println("READY");
    }

    /**
     * Consumes from the first offset until --seconds have passed or --max messages were taken; --refuse N refuses every N-th
     * once, --fail N whenever it comes.
     */
    private static void push(Map<String, List<String>> options) throws Exception {
        DefaultMQPushConsumer consumer =
            new DefaultMQPushConsumer(one(options, "group", "g"), hook(options), new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(one(options, "namesrv", null));
        consumer.setInstanceName("oracle-" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(2);
        consumer.setConsumeThreadMax(2);
        // Else it keeps its offsets while a listener has its last messages still, and these come again to who goes on.
        consumer.setAwaitTerminationMillisWhenShutdown(60_000);
        if (options.containsKey("model")) {
            setEnum(consumer, "setMessageModel", one(options, "model", "").toUpperCase());
        }
        if (options.containsKey("broker-rebalance")) {  // of 5.x alone: who has which queue is asked of brokers
            consumer.getClass().getMethod("setClientRebalance", boolean.class).invoke(consumer, false);
        }
        consumer.subscribe(one(options, "topic", null), one(options, "tag", "*"));
        long max = Long.parseLong(one(options, "max", "1000000000"));
        Counts counts = options.containsKey("count") ? new Counts(Double.parseDouble(one(options, "mib-per-second", "0"))) : null;
        int refuse = Integer.parseInt(one(options, "refuse", "0"));
        int fail = Integer.parseInt(one(options, "fail", "0"));
        if (options.containsKey("max-reconsume")) {
            consumer.setMaxReconsumeTimes(Integer.parseInt(one(options, "max-reconsume", "-1")));
        }
        AtomicLong seen = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        if (options.containsKey("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                return take(messages, 0, fail, seen, max, done)
                    ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            });
        } else if (counts != null) {
            consumer.setConsumeMessageBatchMaxSize(32);
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                counts.add(messages);
                if (seen.addAndGet(messages.size()) >= max) {
                    done.countDown();
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
                take(messages, refuse, fail, seen, max, done)
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER);
        }
        consumer.start();
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.parseLong(one(options, "seconds", "30")));
        while (!done.await(counts == null ? until - System.nanoTime() : 1_000_000_000L, TimeUnit.NANOSECONDS) && System.nanoTime() < until) {
            counts.print();
        }
        consumer.shutdown();
        if (counts != null) {
            counts.print();
        }
    }

    /** With --count: a line each second for what came so far, and how long messages took from the broker's store to here. */
    private static final class Counts {
        private final Map<Integer, BitSet> offsets = new TreeMap<>();
        private final long bytesPerSecond;
        private final long start = System.nanoTime();
        private final int[] millis = new int[60_001];  // messages by what they took since the line before; the last: and more
        private long messages;
        private long bytes;

        Counts(double mibPerSecond) {
            this.bytesPerSecond = (long) (mibPerSecond * (1 << 20));
        }

        void add(List<MessageExt> found) {
            long late;
            synchronized (this) {
                for (MessageExt message : found) {
                    messages++;
                    bytes += message.getStoreSize();
                    offsets.computeIfAbsent(message.getQueueId(), id -> new BitSet()).set((int) message.getQueueOffset());
                    millis[(int) Math.min(Math.max(System.currentTimeMillis() - message.getStoreTimestamp(), 0), 60_000)]++;
                }
                late = bytesPerSecond == 0 ? 0 : bytes * 1_000_000_000L / bytesPerSecond - (System.nanoTime() - start);
            }
            if (late > 0) {
                LockSupport.parkNanos(late);
            }
        }

        synchronized void print() {
            Map<String, Object> out = new LinkedHashMap<>();
            out.put("time_ms", System.currentTimeMillis());
            out.put("messages", messages);
            out.put("bytes", bytes);
            out.put("distinct", offsets.values().stream().mapToLong(BitSet::cardinality).sum());
            out.put("end", offsets.values().stream().mapToLong(BitSet::length).sum());  // so many there would be without holes
            Map<String, Integer> took = new LinkedHashMap<>();
            for (int i = 0; i < millis.length; i++) {
                if (millis[i] > 0) {
                    took.put(Integer.toString(i), millis[i]);
                    millis[i] = 0;
                }
            }
            out.put("took_ms", took);
            OUT.println(RemotingSerializable.toJson(out, false));
        }
    }

    /** A message that is refused is taken when it comes again; one that fails never is. */
    private static boolean take(List<MessageExt> messages, int refuse, int fail, AtomicLong seen, long max, CountDownLatch done) {
        boolean isTaken = true;
        for (MessageExt message : messages) {
            boolean isRefused = refuse > 0 && message.getReconsumeTimes() == 0 && message.getQueueOffset() % refuse == 0
                && !message.getTopic().startsWith("%RETRY%");
            isRefused |= fail > 0 && (message.getReconsumeTimes() > 0 || message.getQueueOffset() % fail == 0);
            Map<String, Object> fields = fields(message);
            fields.put("consumed", !isRefused);
            print(fields);
            isTaken &= !isRefused;
            if (!isRefused && seen.incrementAndGet() >= max) {
                done.countDown();
            }
        }
        return isTaken;
    }

    /** With --assign all queues from the minimum, else a subscription of the group. */
    private static void litePull(Map<String, List<String>> options) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(one(options, "group", "g"), hook(options));
        consumer.setNamesrvAddr(one(options, "namesrv", null));
        consumer.setInstanceName("oracle-" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        String topic = one(options, "topic", null);
        boolean isAssigned = options.containsKey("assign");
        if (options.containsKey("broker-id")) {  // all pulls go to the broker with this id, whatever is suggested
            consumer.start();
            consumer.setDefaultBrokerId(Long.parseLong(one(options, "broker-id", "0")));
            consumer.setConnectBrokerByUser(true);
        }
        if (!isAssigned) {
            consumer.subscribe(topic, one(options, "tag", "*"));
        }
        if (!options.containsKey("broker-id")) {
            consumer.start();
        }
        if (isAssigned) {
            List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues(topic));
            Collections.sort(queues);
            consumer.assign(queues);
            for (MessageQueue queue : queues) {
                consumer.seekToBegin(queue);
            }
        }
        long left = Long.parseLong(one(options, "max", "1000000000"));
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.parseLong(one(options, "seconds", "30")));
        Set<String> seen = new HashSet<>();
        while (left > 0 && System.nanoTime() < until) {
            for (MessageExt message : consumer.poll(500)) {
                // A pull that assign() began may be answered after the seek: the client then delivers its messages twice.
                if (!isAssigned || seen.add(message.getQueueId() + "-" + message.getQueueOffset())) {
                    print(fields(message));
                    left--;
                }
            }
        }
        consumer.commitSync();
        consumer.shutdown();
    }

    private static void view(Map<String, List<String>> options) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("oracle-view", hook(options));
        consumer.setNamesrvAddr(one(options, "namesrv", null));
        consumer.start();
        for (String id : options.get("msgid")) {
            print(fields(consumer.viewMessage(one(options, "topic", null), id)));
        }
        consumer.shutdown();
    }

    /** Signs each request, with --access-key and --secret-key; else null. */
    private static RPCHook hook(Map<String, List<String>> options) {
        return options.containsKey("access-key")
            ? new AclClientRPCHook(new SessionCredentials(one(options, "access-key", null), one(options, "secret-key", null)))
            : null;
    }

    /**
     * Of 4.9 alone: signs each request of stdin as a client does, and says what the validator of brokers makes of it by the rules
     * in --home. A line: home, address, code, version, fields, body_base64, access_key and secret_key (both may be missing).
     */
    private static void judge(Map<String, List<String>> options) throws Exception {
        Map<String, Object> validators = new TreeMap<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<?, ?> asked = RemotingSerializable.fromJson(line, Map.class);
            String home = (String) asked.get("home");
            if (!validators.containsKey(home)) {
                System.setProperty("rocketmq.home.dir", home);
                validators.put(home, Class.forName("org.apache.rocketmq.acl.plain.PlainAccessValidator").getConstructor().newInstance());
            }
            RemotingCommand request = RemotingCommand.createRequestCommand((Integer) asked.get("code"), null);
            request.setVersion((Integer) asked.get("version"));
            request.setBody(Base64.getDecoder().decode((String) asked.get("body_base64")));
            ((Map<?, ?>) asked.get("fields")).forEach((name, value) -> request.addExtField((String) name, (String) value));
            if (asked.get("access_key") != null) {
                new AclClientRPCHook(new SessionCredentials((String) asked.get("access_key"), (String) asked.get("secret_key")))
                    .doBeforeRequest("", request);
            }
            Map<String, Object> found = new TreeMap<>();
            found.put("fields", request.getExtFields());
            found.put("refused", refused(validators.get(home), request, (String) asked.get("address")));
            print(found);
        }
    }

    private static String refused(Object validator, RemotingCommand request, String address) throws Exception {
        Method parse = validator.getClass().getMethod("parse", RemotingCommand.class, String.class);
        Method validate = null;
        for (Method method : validator.getClass().getMethods()) {
            validate = method.getName().equals("validate") ? method : validate;
        }
        try {
            validate.invoke(validator, parse.invoke(validator, request, address));
            return "";
        } catch (InvocationTargetException thrown) {
            return thrown.getCause().toString();
        }
    }

    /** The enumeration has another package in each generation. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    private static void setEnum(Object of, String setter, String value) throws Exception {
        for (Method method : of.getClass().getMethods()) {
            if (method.getName().equals(setter)) {
                method.invoke(of, Enum.valueOf((Class<Enum>) method.getParameterTypes()[0], value));
            }
        }
    }

    private static Map<String, Object> fields(MessageExt message) {
        Map<String, String> properties = new TreeMap<>(message.getProperties());
        ADDED_BY_CLIENT.forEach(properties::remove);
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("topic", message.getTopic());
        out.put("queue_id", message.getQueueId());
        out.put("queue_offset", message.getQueueOffset());
        out.put("broker_name", message.getBrokerName());
        out.put("store_timestamp_ms", message.getStoreTimestamp());
        out.put("born_timestamp_ms", message.getBornTimestamp());
        out.put("born_host", host(message.getBornHost()));
        out.put("store_host", host(message.getStoreHost()));
        out.put("tags", message.getTags());
        out.put("keys", message.getKeys());
        out.put("properties", properties);
        out.put("msg_id", message.getMsgId());
        out.put("offset_msg_id", message instanceof MessageClientExt
            ? ((MessageClientExt) message).getOffsetMsgId() : message.getMsgId());
        out.put("flag", message.getFlag());
        out.put("sys_flag", message.getSysFlag());
        out.put("body_crc", message.getBodyCRC());
        out.put("reconsume_times", message.getReconsumeTimes());
        out.put("prepared_transaction_offset", message.getPreparedTransactionOffset());
        out.put("body_base64", Base64.getEncoder().encodeToString(message.getBody() == null ? new byte[0] : message.getBody()));
        return out;
    }

    private static String host(SocketAddress address) {
        InetSocketAddress inet = (InetSocketAddress) address;
        String ip = inet.getAddress().getHostAddress();
        return (ip.indexOf(':') >= 0 ? "[" + ip + "]" : ip) + ":" + inet.getPort();
    }

    private static synchronized void print(Map<String, Object> fields) {
        OUT.println(RemotingSerializable.toJson(fields, false));
    }

    /** Each option has a value, or none when another option, or nothing, follows. */
    private static Map<String, List<String>> options(String[] argv) {
        Map<String, List<String>> found = new TreeMap<>();
        for (int i = 0; i < argv.length; i++) {
            if (!argv[i].startsWith("--")) {
                throw new IllegalArgumentException(argv[i]);
            }
            List<String> values = found.computeIfAbsent(argv[i].substring(2), name -> new ArrayList<>());
            while (i + 1 < argv.length && !argv[i + 1].startsWith("--")) {
                values.add(argv[++i]);
            }
        }
        return found;
    }

    private static String one(Map<String, List<String>> options, String name, String otherwise) {
        List<String> values = options.get(name);
        if (values == null && otherwise == null) {
            throw new IllegalArgumentException("--" + name + " is required");
        }
        return values == null ? otherwise : values.get(0);
    }
}
