"use strict";

const part = (id) => document.getElementById(id);
const history = [];
let running = null;

part("key").value = sessionStorage.getItem("key") ?? "";
part("key").addEventListener("change", () => {
  sessionStorage.setItem("key", part("key").value);
  showModel();
});

function headers() {
  const key = part("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const again = response.headers.get("retry-after");
  const message = body?.error?.message ?? `${response.status} ${response.statusText}`;
  return new Error(again ? `${message} (try again in ${again} s)` : message);
}

async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) part("settings").open = true;
    if (!response.ok) throw await failure(response);
    part("model").textContent = (await response.json()).data[0].id;
    part("status").textContent = "";
  } catch (error) {
    part("status").textContent = error.message;
  }
}

function element(parent, name, kind, text = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  parent.append(made);
  return made;
}

function followed(change) {
  const turns = part("turns");
  const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
  change();
  if (atEnd) turns.scrollTop = turns.scrollHeight;
}

// The answer as it grows: thinking, folded once the answer begins; content; tool calls.
class Answer {
  constructor() {
    this.article = element(part("turns"), "article", "assistant");
    this.message = { role: "assistant", content: "", reasoning_content: "", tool_calls: [] };
    this.calls = [];
  }

  add(delta) {
    if (delta.reasoning_content) {
      this.thinking ??= this.beginThinking();
      this.thinking.append(delta.reasoning_content);
      this.message.reasoning_content += delta.reasoning_content;
    }
    if (delta.content) {
      this.fold();
      this.content ??= element(this.article, "div", "content");
      this.content.append(delta.content);
      this.message.content += delta.content;
    }
    for (const call of delta.tool_calls ?? []) this.addCall(call);
  }

  beginThinking() {
    this.details = element(this.article, "details", "thinking");
    this.details.open = true;
    element(this.details, "summary", "", "Thinking");
    return element(this.details, "div", "");
  }

  fold() {
    if (this.details && !this.content) this.details.open = false;
  }

  addCall(piece) {
    this.fold();
    const call = (this.message.tool_calls[piece.index] ??= {
      id: piece.id,
      type: "function",
      function: { name: piece.function.name, arguments: "" },
    });
    call.function.arguments += piece.function.arguments ?? "";
    const shown = (this.calls[piece.index] ??= element(this.article, "pre", "call"));
    shown.textContent = `${call.function.name}(${call.function.arguments})`;
  }
}

function request() {
  const number = (id) => (part(id).value === "" ? undefined : Number(part(id).value));
  const tools = part("tools").value.trim();
  return {
    messages: history,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    max_tokens: number("limit"),
    tools: tools ? JSON.parse(tools) : undefined,
    chat_template_kwargs: part("think").checked ? undefined : { enable_thinking: false },
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.slice("data: ".length);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function stream(answer) {
  const started = performance.now();
  let first = 0;
  let reason = "";
  running = new AbortController();
  const body = JSON.stringify(request());
  const options = { method: "POST", headers: headers(), body, signal: running.signal };
  const response = await fetch("v1/chat/completions", options);
  if (!response.ok) throw await failure(response);
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    first ||= performance.now();
    const choice = chunk.choices[0];
    if (choice) followed(() => answer.add(choice.delta));
    reason = choice?.finish_reason ?? reason;
    if (chunk.usage) showSpeed(chunk.usage, started, first, reason);
  }
}

function showSpeed(usage, started, first, reason) {
  const tokens = usage.completion_tokens;
  const seconds = (performance.now() - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const end = reason === "length" ? ", cut at the limit" : "";
  part("status").textContent = `${tokens} tokens${rate}, first after ${Math.round(first - started)} ms${end}`;
}

function keep(answer) {
  const { message } = answer;
  if (!message.reasoning_content) delete message.reasoning_content;
  if (!message.tool_calls.length) delete message.tool_calls;
  if (message.content || message.tool_calls) history.push(message);
}

async function say(text) {
  history.push({ role: "user", content: text });
  followed(() => element(part("turns"), "article", "user", text));
  part("turns").scrollTop = part("turns").scrollHeight;
  const answer = new Answer();
  busy(true);
  try {
    await stream(answer);
    keep(answer);
  } catch (error) {
    if (error.name === "AbortError") {
      keep(answer);
      part("status").textContent = "stopped";
    } else {
      history.pop();
      element(part("turns"), "article", "failed", error.message).setAttribute("role", "alert");
      part("text").value ||= text;
    }
  }
  busy(false);
}

function busy(yes) {
  part("send").hidden = yes;
  part("stop").hidden = !yes;
  running = yes ? running : null;
  if (yes) part("status").textContent = "waiting";
  (yes ? part("stop") : part("text")).focus();
}

part("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = part("text").value.trim();
  if (!text || running) return;
  part("text").value = "";
  say(text);
});

part("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    part("form").requestSubmit();
  }
});

part("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

part("clear").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  part("turns").replaceChildren();
  part("status").textContent = "";
  part("text").focus();
});

showModel();
