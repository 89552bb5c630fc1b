// Functions for all consoles: the token, the server that it is for, the state that is shown, and the WebSocket.

const element = (id) => document.getElementById(id);

element("again").addEventListener("click", () => location.reload());
element("full-screen").addEventListener("click", () => {
  if (document.fullscreenElement) document.exitFullscreen();
  else document.documentElement.requestFullscreen();
});

export function show(state, quality = "") {
  element("state").textContent = state;
  element("state").className = quality;
}

export function fail(message) {
  show("not connected", "bad");
  element("message").textContent = message;
  element("message").hidden = false;
  element("again").hidden = false;
}

// A link has the token (?token=…), or like noVNC's links the WebSocket's path with the token in it (?path=…).
function token() {
  const query = new URLSearchParams(location.search);
  const path = query.get("path") ?? "";
  return query.get("token") ?? new URLSearchParams(path.slice(path.indexOf("?") + 1)).get("token") ?? "";
}

async function ask() {
  const answer = await fetch(`session?${new URLSearchParams({ token: token() })}`, { cache: "no-store" });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said.server;
}

// Show why there is no connection. The proxy is asked about the token, because the browser does not know why a WebSocket
// was refused. The hint is for a token that is still valid.
export async function explain(reason, hint = "") {
  try {
    await ask();
    fail(`${reason || "The connection to the console was lost."} ${hint}`.trim());
  } catch (error) {
    fail(reason || error.message);
  }
}

// Return the address of the console's WebSocket; if the token is not valid, show a message and return null.
export async function locate(protocol) {
  try {
    const server = await ask();
    if (server.protocol !== protocol) {
      throw new Error(`This link is for the server's ${server.protocol} console: ask for one of the other kind.`);
    }
    document.title = server.name;
    element("server").textContent = server.name;
  } catch (error) {
    fail(error.message);
    return null;
  }
  const address = new URL("websockify", location.href);
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  address.search = new URLSearchParams({ token: token() });
  return address;
}

// Return a WebSocket to the console; if the token is not valid, show a message and return null.
export async function connect(protocol) {
  const address = await locate(protocol);
  if (!address) return null;
  const socket = new WebSocket(address, ["binary"]);
  socket.binaryType = "arraybuffer";
  socket.addEventListener("close", (event) => explain(event.reason));
  return socket;
}
