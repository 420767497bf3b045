package oracle;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.filter.ExpressionType;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.TopicFilterType;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.remoting.protocol.filter.FilterAPI;
import org.apache.rocketmq.remoting.protocol.heartbeat.SubscriptionData;

/**
 * Which messages which filter expressions take. Both commands read one JSON object from stdin:
 * {@code {"messages": [base64 of stored properties, ...], "expressions": [{"kind": "SQL92", "text": "..."}, ...]}}.
 */
final class Filters {
    private static final int BATCH = 32;

    private Filters() {
    }

    /** Asks the filter classes of the broker and the client directly, without a server. */
    static void ask(String[] argv) throws Exception {
        new Args(argv);
        JSONObject question = question();
        List<Map<String, String>> messages = messages(question);
        for (Object asked : question.getJSONArray("expressions")) {
            print((JSONObject) asked, messages);
        }
    }

    private static void print(JSONObject asked, List<Map<String, String>> messages) {
        Map<String, Object> out = new LinkedHashMap<>(asked);
        try {
            out.put("answers", asked.getString("kind").equals(ExpressionType.SQL92)
                ? sql(asked.getString("text"), messages) : tags(asked.getString("text"), messages));
        } catch (Exception e) {
            Throwable cause = e.getCause() == null ? e : e.getCause();
            out.put("error", String.valueOf(cause.getMessage()));
        }
        Records.print(out);
    }

    /** T, F, N (null) or X (evaluation fails) for each message. */
    private static String sql(String text, List<Map<String, String>> messages) throws Exception {
        Expression expression = FilterFactory.INSTANCE.get(ExpressionType.SQL92).compile(text);
        StringBuilder answers = new StringBuilder();
        for (Map<String, String> properties : messages) {
            try {
                Object answer = expression.evaluate(new MessageEvaluationContext(properties));
                answers.append(answer == null ? 'N' : (Boolean) answer ? 'T' : 'F');
            } catch (Exception e) {
                answers.append('X');
            }
        }
        return answers.toString();
    }

    /** T or F: by code as the broker does, then by text as the client does. */
    private static String tags(String text, List<Map<String, String>> messages) throws Exception {
        SubscriptionData wanted = FilterAPI.buildSubscriptionData("topic", text);
        StringBuilder answers = new StringBuilder();
        for (Map<String, String> properties : messages) {
            String tags = properties.get(MessageConst.PROPERTY_TAGS);
            long code = MessageExtBrokerInner.tagsString2tagsCode(TopicFilterType.SINGLE_TAG, tags);
            boolean all = wanted.getSubString().equals(SubscriptionData.SUB_ALL);
            Set<String> names = wanted.getTagsSet();
            boolean byCode = all || wanted.getCodeSet().contains((int) code);
            boolean byText = names.isEmpty() || tags != null && names.contains(tags);
            answers.append(byCode && byText ? 'T' : 'F');
        }
        return answers.toString();
    }

    /** Sends the messages to a broker, and pulls them with each expression by a real consumer. */
    static void live(String[] argv) throws Exception {
        Args args = new Args(argv, "namesrv", "topic");
        String topic = args.need("topic");
        JSONObject question = question();
        Produce.createTopic(new Args(new String[] {"--namesrv", args.need("namesrv"), "--queues", "1"}, "namesrv", "queues", "attr"), topic);
        List<Long> offsets = send(args.need("namesrv"), topic, messages(question));
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("oracle-filters");
        consumer.setNamesrvAddr(args.need("namesrv"));
        consumer.start();
        MessageQueue queue = consumer.fetchSubscribeMessageQueues(topic).iterator().next();
        MQClientInstance client = consumer.getDefaultMQPullConsumerImpl().getRebalanceImpl().getmQClientFactory();
        client.updateTopicRouteInfoFromNameServer(topic);
        client.sendHeartbeatToAllBrokerWithLock();  // tells the broker's version, without which no SQL is sent
        for (Object asked : question.getJSONArray("expressions")) {
            Records.print(pull(consumer, queue, (JSONObject) asked, offsets));
        }
        consumer.shutdown();
    }

    private static Map<String, Object> pull(DefaultMQPullConsumer consumer, MessageQueue queue, JSONObject asked,
        List<Long> offsets) throws Exception {
        Map<String, Object> out = new LinkedHashMap<>(asked);
        String text = asked.getString("text");
        MessageSelector selector = asked.getString("kind").equals(ExpressionType.SQL92)
            ? MessageSelector.bySql(text) : MessageSelector.byTag(text);
        char[] answers = new char[offsets.size()];
        Arrays.fill(answers, 'F');
        long end = offsets.get(offsets.size() - 1) + 1;
        try {
            for (long at = offsets.get(0); at < end; ) {
                PullResult result = consumer.pull(queue, selector, at, BATCH);
                if (result.getMsgFoundList() != null) {
                    for (MessageExt message : result.getMsgFoundList()) {
                        answers[offsets.indexOf(message.getQueueOffset())] = 'T';
                    }
                }
                if (result.getNextBeginOffset() <= at) {
                    throw new IllegalStateException("stopped at offset " + at + ": " + result);
                }
                at = result.getNextBeginOffset();
            }
            out.put("answers", new String(answers));
        } catch (MQBrokerException | MQClientException e) {
            out.put("error", String.valueOf(e.getMessage()).lines().findFirst().orElse(""));
        }
        return out;
    }

    private static List<Long> send(String namesrv, String topic, List<Map<String, String>> messages) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("oracle-filters-producer");
        producer.setNamesrvAddr(namesrv);
        producer.start();
        MessageQueue queue = producer.fetchPublishMessageQueues(topic).get(0);
        List<Long> offsets = new ArrayList<>();
        for (Map<String, String> properties : messages) {
            Message message = new Message(topic, "x".getBytes(StandardCharsets.UTF_8));
            properties.forEach((name, value) -> MessageAccessor.putProperty(message, name, value));
            SendResult result = producer.send(message, queue);
            offsets.add(result.getQueueOffset());
        }
        producer.shutdown();
        return offsets;
    }

    private static JSONObject question() throws Exception {
        return JSON.parseObject(System.in.readAllBytes());
    }

    private static List<Map<String, String>> messages(JSONObject question) {
        List<Map<String, String>> messages = new ArrayList<>();
        JSONArray stored = question.getJSONArray("messages");
        for (int i = 0; i < stored.size(); i++) {
            byte[] raw = Base64.getDecoder().decode(stored.getString(i));
            messages.add(MessageDecoder.string2messageProperties(new String(raw, StandardCharsets.UTF_8)));
        }
        return messages;
    }
}
