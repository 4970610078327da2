// A session with OpenAI's JavaScript package. Usage: node session.mjs BASE_URL KEY
import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const [baseURL, apiKey] = process.argv.slice(2);
const options = { baseURL, apiKey, maxRetries: 0, timeout: 20000 };
const client = new OpenAI(options);
const model = (await client.models.list()).data[0].id;
const user = (content) => [{ role: "user", content }];
const chat = (body) => client.chat.completions.create({ model, ...body });
const parameters = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

assert.equal((await client.models.retrieve(model)).id, model);

let r = await chat({ messages: user("[chat]") });
assert.equal(r.choices[0].message.content, "Hello.");
assert.equal(r.choices[0].message.reasoning_content, "A greeting.");
assert.equal(r.choices[0].finish_reason, "stop");
assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);

let text = "", thoughts = "", usage = null;
for await (const chunk of await chat({ messages: user("[stream]"), stream: true, stream_options: { include_usage: true } })) {
  usage = chunk.usage ?? usage;
  for (const choice of chunk.choices) {
    text += choice.delta.content ?? "";
    thoughts += choice.delta.reasoning_content ?? "";
  }
}
assert.deepEqual([text, thoughts], ["one two three 🙂", "Count."]);
assert(usage.completion_tokens > 0);

const messages = user("[tool] weather in Rome?");
const streamed = await client.chat.completions.stream({ model, messages, tools }).finalChatCompletion();
const plain = await chat({ messages, tools });
for (const choice of [streamed.choices[0], plain.choices[0]]) {
  const call = choice.message.tool_calls[0];
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(call.function.name, "weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Rome", days: 2 });
}
const answered = plain.choices[0].message;
const result = { role: "tool", tool_call_id: answered.tool_calls[0].id, content: "sunny" };
r = await chat({ messages: [...messages, answered, result, ...user("[result] so?")], tools });
assert.equal(r.choices[0].message.content, "It is sunny.");

r = await chat({ messages: user("[chat]"), logprobs: true, top_logprobs: 2 });
const entries = r.choices[0].logprobs.content;
assert.equal(Buffer.from(entries.flatMap((e) => e.bytes)).toString(), "Hello.");
assert(entries.every((e) => e.top_logprobs.length === 2 && e.logprob <= 0));

const fails = async (kind, body) => {
  try {
    await chat({ messages: user("[chat]"), ...body });
  } catch (error) {
    assert(error instanceof kind, `${error}`);
    return error;
  }
  assert.fail(`no ${kind.name} for ${JSON.stringify(body)}`);
};
assert.equal((await fails(OpenAI.NotFoundError, { model: "nope" })).code, "model_not_found");
assert.equal((await fails(OpenAI.BadRequestError, { temperature: 5 })).param, "temperature");
const long = user("word ".repeat(90000));
assert.equal((await fails(OpenAI.BadRequestError, { messages: long })).code, "context_length_exceeded");
await fails(OpenAI.InternalServerError, { messages: user("[fault]") });
await assert.rejects(async () => {
  for await (const _ of await chat({ messages: user("[fault]"), stream: true }));
}, OpenAI.APIError);
await assert.rejects(new OpenAI({ ...options, apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
console.log(`openai for JavaScript ${VERSION}: the session passed`);
