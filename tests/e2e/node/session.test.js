// OpenAI's npm client against a mesh: `node --test session.test.js` with BASE_URL and MODEL.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const greedy = { model, temperature: 0, max_tokens: 24 };
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false },
  },
};

test("a chat is answered, and a stream of it is the same text with usage at its end", async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages });
  assert.match(whole.choices[0].message.content, /Paris/);
  let text = "", last;
  const stream = await client.chat.completions.create({ ...greedy, messages, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
});

test("a tool call goes round: asked for, called, answered", async () => {
  const asked = await client.chat.completions.create({
    ...greedy, messages, max_tokens: 96, tools: [weather], tool_choice: "required", parallel_tool_calls: false,
  });
  const [choice] = asked.choices;
  assert.equal(choice.finish_reason, "tool_calls");
  const [call] = choice.message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
  const turns = [...messages, choice.message, { role: "tool", tool_call_id: call.id, content: "Sunny, 20 degrees" }];
  const answer = await client.chat.completions.create({ ...greedy, messages: turns, tools: [weather], tool_choice: "none" });
  assert.ok(answer.choices[0].message.content.length > 0);
});

test("the client's own accumulator makes a whole call of streamed deltas", async () => {
  const choice = { type: "function", function: { name: "get_weather" } };
  const stream = client.chat.completions.stream({ ...greedy, messages, tools: [weather], tool_choice: choice });
  const final = await stream.finalChatCompletion();
  const [call] = final.choices[0].message.tool_calls;
  assert.match(call.id, /^chatcmpl-tool-/);
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
});

test("the client runs tools by itself until there is an answer", async () => {
  const seen = [];
  const runnable = { ...weather, function: { ...weather.function, parse: JSON.parse, function: ({ city }) => (seen.push(city), `Sunny in ${city}`) } };
  const runner = client.chat.completions.runTools(
    { ...greedy, messages, tools: [runnable], tool_choice: { type: "function", function: { name: "get_weather" } } },
    { maxChatCompletions: 1 },
  );
  await runner.done();
  assert.equal(seen.length, 1);
});

test("a JSON schema is kept to", async () => {
  const schema = { type: "object", properties: { capital: { type: "string", maxLength: 12 } }, required: ["capital"], additionalProperties: false };
  const answer = await client.chat.completions.create({
    ...greedy, messages, max_tokens: 48, response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
  });
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(typeof JSON.parse(answer.choices[0].message.content).capital, "string");
});

test("log-probabilities, completions and models have their shapes", async () => {
  const answer = await client.chat.completions.create({ ...greedy, messages, max_tokens: 4, logprobs: true, top_logprobs: 2 });
  const listed = answer.choices[0].logprobs.content;
  assert.equal(listed.length, answer.usage.completion_tokens);
  assert.equal(listed[0].top_logprobs[0].token, listed[0].token);
  const completion = await client.completions.create({ model, prompt: "The capital of France is", max_tokens: 4, temperature: 0, logprobs: 1 });
  assert.match(completion.choices[0].text, /Paris/);
  assert.equal(completion.choices[0].logprobs.tokens.length, 4);
  const names = [];
  for await (const card of client.models.list()) names.push(card.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("errors are the client's own classes, with parameter and code", async () => {
  await assert.rejects(client.chat.completions.create({ ...greedy, messages, top_p: 2 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.status, error.param, error.code, error.type], [400, "top_p", "invalid_request", "invalid_request_error"]);
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...greedy, messages, model: "nobody" }), OpenAI.NotFoundError);
  const endless = { model, messages, max_tokens: 2000, temperature: 0 };
  await assert.rejects(client.chat.completions.create({ ...endless, ignore_eos: true }, { timeout: 200 }), OpenAI.APIConnectionTimeoutError);
});

test("a stream that the client leaves ends there", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 2000, ignore_eos: true, stream: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
});
