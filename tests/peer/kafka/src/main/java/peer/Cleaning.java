package peer;

import java.io.File;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Random;
import java.util.stream.Stream;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.record.MemoryRecords;
import org.apache.kafka.common.record.SimpleRecord;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.KafkaScheduler;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/**
 * Kafka's own cleaner, on logs of its own making: {@code DIR MESSAGES KEYS BODY_BYTES BATCH RUNS}. One JSON line a run, in one
 * JVM, so that the later ones are of compiled code as in a broker that has run for a while. Sizes are a broker's defaults.
 */
public final class Cleaning {
    private Cleaning() {}

    public static void main(String[] args) throws Exception {
        Path folder = Path.of(args[0]);
        int messages = Integer.parseInt(args[1]);
        int keys = Integer.parseInt(args[2]);
        int bodyBytes = Integer.parseInt(args[3]);
        int batch = Integer.parseInt(args[4]);
        int runs = Integer.parseInt(args[5]);
        for (int run = 0; run < runs; run++) {
            Path log = folder.resolve("prices-" + run);
            Files.createDirectories(log);
            clean(log.toFile(), messages, keys, bodyBytes, batch);
            try (Stream<Path> files = Files.walk(log)) {
                files.sorted(Comparator.reverseOrder()).map(Path::toFile).forEach(File::delete);
            }
        }
    }

    private static void clean(File folder, int messages, int keys, int bodyBytes, int batch) throws Exception {
        Properties set = new Properties();
        set.put("cleanup.policy", "compact");
        set.put("segment.bytes", "104857600");
        KafkaScheduler scheduler = new KafkaScheduler(1);
        scheduler.startup();
        UnifiedLog log = UnifiedLog.create(
            folder, new LogConfig(set), 0, 0, scheduler, new BrokerTopicStats(), Time.SYSTEM, 900_000,
            new ProducerStateManagerConfig(86_400_000, false), 600_000, new LogDirFailureChannel(1), true, Optional.empty());
        fill(log, messages, keys, bodyBytes, batch);
        log.roll();
        log.flush(true);
        Cleaner cleaner = new Cleaner(
            0, new SkimpyOffsetMap(128 << 20, "MD5"), 256 << 10, 1 << 20, 0.9,
            new Throttler(Double.MAX_VALUE, 300, "cleaner", "entries", Time.SYSTEM), Time.SYSTEM, partition -> { });
        LogToClean what = new LogToClean(log, 0, log.activeSegment().baseOffset(), false);
        long cpu = ManagementFactory.getThreadMXBean().getCurrentThreadCpuTime();
        Map.Entry<Long, CleanerStats> done = cleaner.clean(what);
        cpu = ManagementFactory.getThreadMXBean().getCurrentThreadCpuTime() - cpu;
        CleanerStats stats = done.getValue();
        System.out.printf(
            "{\"side\": \"kafka\", \"messages\": %d, \"left_bytes\": %d, \"log_bytes\": %d, \"cpu_s\": %.3f}%n",
            stats.messagesRead(), stats.bytesWritten(), stats.bytesRead(), cpu / 1e9);
        log.close();
        scheduler.shutdown();
    }

    private static void fill(UnifiedLog log, int messages, int keys, int bodyBytes, int batch) throws Exception {
        byte[] noise = new byte[1 << 20];
        new Random(1).nextBytes(noise);
        for (int first = 0; first < messages; first += batch) {
            SimpleRecord[] some = new SimpleRecord[Math.min(batch, messages - first)];
            for (int at = 0; at < some.length; at++) {
                long number = first + at;
                byte[] key = ("key-" + keyOf(number, keys)).getBytes(StandardCharsets.UTF_8);
                ByteBuffer body = ByteBuffer.wrap(noise, (int) (number % (noise.length - bodyBytes)), bodyBytes);
                some[at] = new SimpleRecord(1_700_000_000_000L + number, ByteBuffer.wrap(key), body.slice());
            }
            log.appendAsLeader(MemoryRecords.withRecords(Compression.NONE, some), 0);
        }
    }

    /** The same on the other side. */
    private static long keyOf(long number, int keys) {
        return ((number * 6364136223846793005L + 1442695040888963407L) >>> 33) % keys;
    }
}
