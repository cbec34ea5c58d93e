/** The line in a cell that waits for its GPU. */
import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

import { watchForWaits } from '../lib/waitline.js';

globalThis.window = globalThis;

const trans = { __: (text, ...values) => text.replace(/%(\d)/g, (_, n) => String(values[n - 1])) };

class Signal {
  slots = new Set();
  connect(slot) {
    this.slots.add(slot);
  }
  disconnect(slot) {
    this.slots.delete(slot);
  }
  emit(value) {
    this.slots.forEach(slot => slot(this, value));
  }
}

/** A notebook with two cells, the model of a session, and what the kernel and the service say. */
function world() {
  const cell = id => {
    const outputs = [];
    return {
      isDisposed: false,
      model: {
        type: 'code',
        outputs: {
          get length() {
            return outputs.length;
          },
          get: n => outputs[n],
          set: (n, output) => (outputs[n] = output),
          add: output => outputs.push(output),
          texts: () => outputs.map(output => output.data['text/plain'])
        }
      },
      outputArea: { future: { msg: { header: { msg_id: id } } } }
    };
  };
  const cells = [cell('first'), cell('second')];
  const iopubMessage = new Signal();
  const statusReceived = new Signal();
  const model = { statusReceived, reading: { status: null }, refresh: mock.fn() };
  let extension;
  const app = { docRegistry: { addWidgetExtension: (_, made) => (extension = made) } };
  watchForWaits(app, model, trans);
  const off = extension.createNew({
    context: { path: 'a.ipynb' },
    sessionContext: { iopubMessage },
    content: { widgets: cells }
  });
  const says = (id, msg_type, content = {}) =>
    iopubMessage.emit({ header: { msg_type }, parent_header: { msg_id: id }, content });
  return {
    model,
    off,
    signals: [iopubMessage, statusReceived],
    texts: n => cells[n].model.outputs.texts(),
    print: n => cells[n].model.outputs.add({ data: { 'text/plain': 'own' }, metadata: {} }),
    begins: id => says(id, 'execute_input'),
    ends: id => says(id, 'status', { execution_state: 'idle' }),
    tells(state, more = {}) {
      const parked = state === 'PARKED' ? { wanted: true, memory_mib: 1, since_s: 0 } : null;
      const session = { state, parked, position: 2, expected_start_at_s: null, ...more };
      model.reading.status = { session };
      statusReceived.emit(model.reading.status);
    }
  };
}

const WAITS = 'This session waits for its GPU. 2nd in the queue, start time not known.';

test('a running cell has one line while its session waits, and then how long it waited', t => {
  t.mock.timers.enable({ apis: ['Date', 'setTimeout'] });
  const { model, ...lab } = world();
  lab.tells('PARKED', { parked: { wanted: false, memory_mib: 1, since_s: 0 } });
  lab.begins('second');
  lab.print(1);
  t.mock.timers.tick(2000);
  assert.equal(model.refresh.mock.callCount(), 1, 'a parked session is looked at soon');
  lab.tells('PARKED');
  lab.tells('PARKED');
  assert.deepEqual([lab.texts(0), lab.texts(1)], [[], ['own', WAITS]]);
  lab.print(1);
  lab.tells('RESUMING');
  t.mock.timers.tick(10_000);
  lab.tells('RUNNING');
  const waited = 'Waited 12 s for the GPU.';
  assert.deepEqual(lab.texts(1), ['own', waited, 'own']);
  lab.ends('second');
  lab.tells('PARKED');
  assert.deepEqual(lab.texts(1), ['own', waited, 'own'], 'no cell runs');
});

test('a cell that is stopped says for how long it waited, from when it began to wait', t => {
  t.mock.timers.enable({ apis: ['Date', 'setTimeout'] });
  const lab = world();
  lab.tells('RUNNING');
  lab.begins('first');
  t.mock.timers.tick(60_000);
  lab.tells('RUNNING');
  t.mock.timers.tick(3000);
  lab.tells('PARKED');
  t.mock.timers.tick(4000);
  lab.ends('first');
  assert.deepEqual(lab.texts(0), ['Waited 7 s for the GPU.']);
});

test('a cell that needs no wait, and a closed notebook, have no line', () => {
  const lab = world();
  lab.begins('first');
  lab.tells('RUNNING');
  lab.ends('first');
  lab.begins('second');
  lab.off.dispose();
  assert.deepEqual(lab.signals.map(signal => signal.slots.size), [0, 0]);
  assert.deepEqual([lab.texts(0), lab.texts(1)], [[], []]);
});
