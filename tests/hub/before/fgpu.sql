-- What a Hub of the commit before the engines had a seam left in its database when it was killed: a session that had
-- ended, one that ran, two that waited, a banner, a quota and the audit log. Instants are moved by the test.
BEGIN TRANSACTION;
CREATE TABLE fgpu_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT fgpu_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "fgpu_alembic_version" VALUES('0006');
CREATE TABLE fgpu_audit (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at_s BIGINT NOT NULL, 
	actor TEXT NOT NULL, 
	action TEXT NOT NULL, 
	target TEXT NOT NULL, 
	details TEXT NOT NULL
);
INSERT INTO "fgpu_audit" VALUES(1,1795367301,'admin','banner.set','banner','warning: The power is off on Friday');
INSERT INTO "fgpu_audit" VALUES(2,1795367301,'admin','quota.set','user ''carol''','3 sessions');
CREATE TABLE fgpu_banner (
	id INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	level TEXT NOT NULL, 
	until_at_s BIGINT, 
	set_by TEXT NOT NULL, 
	set_at_s BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT fgpu_banner_one_row CHECK (id = 1)
);
INSERT INTO "fgpu_banner" VALUES(1,'The power is off on Friday','warning',NULL,'admin',1795367301);
CREATE TABLE fgpu_devices (
	uuid TEXT NOT NULL, 
	node_id TEXT NOT NULL, 
	device_index INTEGER NOT NULL, 
	model TEXT NOT NULL, 
	memory_mib BIGINT NOT NULL, 
	capacity_milli BIGINT NOT NULL, 
	simulated BOOLEAN NOT NULL, 
	retired BOOLEAN NOT NULL, max_shares INTEGER DEFAULT '20' NOT NULL, 
	PRIMARY KEY (uuid), 
	CONSTRAINT fgpu_devices_node FOREIGN KEY(node_id) REFERENCES fgpu_nodes (id)
);
INSERT INTO "fgpu_devices" VALUES('GPU-simulated-local-0','local',0,'Simulated GPU 8192 MiB',8192,2000,1,0,20);
CREATE TABLE fgpu_end_messages (
	session_id BIGINT NOT NULL, 
	message TEXT NOT NULL, 
	said_at_s BIGINT NOT NULL, 
	PRIMARY KEY (session_id)
);
CREATE TABLE fgpu_events (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at_s BIGINT NOT NULL, 
	session_id BIGINT, 
	kind TEXT NOT NULL, 
	from_state TEXT, 
	to_state TEXT, 
	reason TEXT, 
	user_name TEXT
);
INSERT INTO "fgpu_events" VALUES(1,1795367276,NULL,'nodes',NULL,NULL,'local: added',NULL);
INSERT INTO "fgpu_events" VALUES(2,1795367276,NULL,'quotas',NULL,NULL,'each user: 4 fGPU',NULL);
INSERT INTO "fgpu_events" VALUES(3,1795367280,1,'submitted',NULL,'PENDING',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(4,1795367280,1,'moved','PENDING','SCHEDULED',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(5,1795367280,1,'moved','SCHEDULED','PREPARING',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(6,1795367280,1,'moved','PREPARING','RUNNING',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(7,1795367296,1,'moved','RUNNING','TERMINATING','USER','alice');
INSERT INTO "fgpu_events" VALUES(8,1795367296,1,'moved','TERMINATING','TERMINATED','USER','alice');
INSERT INTO "fgpu_events" VALUES(9,1795367297,2,'submitted',NULL,'PENDING',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(10,1795367297,2,'moved','PENDING','SCHEDULED',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(11,1795367297,2,'moved','SCHEDULED','PREPARING',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(12,1795367297,2,'moved','PREPARING','RUNNING',NULL,'alice');
INSERT INTO "fgpu_events" VALUES(13,1795367297,3,'submitted',NULL,'PENDING',NULL,'bob');
INSERT INTO "fgpu_events" VALUES(14,1795367297,3,'waits',NULL,NULL,'RESOURCES','bob');
INSERT INTO "fgpu_events" VALUES(15,1795367299,4,'submitted',NULL,'PENDING',NULL,'carol');
INSERT INTO "fgpu_events" VALUES(16,1795367299,4,'waits',NULL,NULL,'RESOURCES','carol');
INSERT INTO "fgpu_events" VALUES(17,1795367301,NULL,'quotas',NULL,NULL,'user ''carol'': 3 sessions',NULL);
CREATE TABLE fgpu_image_edits (
	slug TEXT NOT NULL, 
	entry TEXT, 
	changes TEXT DEFAULT '{}' NOT NULL, 
	position INTEGER, 
	changed_by TEXT NOT NULL, 
	changed_at_s BIGINT NOT NULL, 
	PRIMARY KEY (slug)
);
CREATE TABLE fgpu_meta (
	id INTEGER NOT NULL, 
	version BIGINT NOT NULL, 
	installation_id TEXT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT fgpu_meta_one_row CHECK (id = 1)
);
INSERT INTO "fgpu_meta" VALUES(1,18,'0abcb9ccf89e');
CREATE TABLE fgpu_meters (
	session_id INTEGER NOT NULL, 
	at_s BIGINT NOT NULL, 
	gpu_millionths BIGINT NOT NULL, 
	limit_mib BIGINT NOT NULL, 
	samples BIGINT NOT NULL, 
	covered_s BIGINT NOT NULL, 
	peak_mib BIGINT, 
	p95_mib BIGINT, 
	sm_p95_percent INTEGER, 
	energy_mj BIGINT, 
	energy_estimated BOOLEAN DEFAULT 0 NOT NULL, 
	counts TEXT DEFAULT '{}' NOT NULL, 
	PRIMARY KEY (session_id)
);
CREATE TABLE fgpu_nodes (
	id TEXT NOT NULL, 
	resource_group TEXT NOT NULL, 
	cpu_milli BIGINT NOT NULL, 
	memory_mib BIGINT NOT NULL, 
	state TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "fgpu_nodes" VALUES('local','default',2000,8192,'READY');
CREATE TABLE fgpu_private_images (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	owner TEXT NOT NULL, 
	name TEXT NOT NULL, 
	reference TEXT NOT NULL, 
	state TEXT NOT NULL, 
	message TEXT, 
	node_id TEXT NOT NULL, 
	image_id TEXT, 
	size_bytes BIGINT, 
	session_id BIGINT NOT NULL, 
	made_from TEXT NOT NULL, 
	base TEXT NOT NULL, 
	facts TEXT DEFAULT '{}' NOT NULL, 
	recipe TEXT, 
	shared_users TEXT DEFAULT '[]' NOT NULL, 
	shared_groups TEXT DEFAULT '[]' NOT NULL, 
	asked_by TEXT NOT NULL, 
	asked_at_s BIGINT NOT NULL, 
	made_at_s BIGINT, 
	UNIQUE (name), 
	UNIQUE (reference)
);
CREATE TABLE fgpu_quota_edits (
	scope TEXT NOT NULL, 
	name TEXT NOT NULL, 
	resource_group TEXT NOT NULL, 
	removed BOOLEAN NOT NULL, 
	max_fgpu_milli BIGINT, 
	max_sessions INTEGER, 
	max_pending INTEGER, 
	max_lifetime_s BIGINT, 
	changed_by TEXT NOT NULL, 
	changed_at_s BIGINT NOT NULL, 
	PRIMARY KEY (scope, name, resource_group)
);
INSERT INTO "fgpu_quota_edits" VALUES('user','carol','',0,NULL,3,NULL,NULL,'admin',1795367301);
CREATE TABLE fgpu_quotas (
	scope TEXT NOT NULL, 
	name TEXT NOT NULL, 
	resource_group TEXT NOT NULL, 
	max_fgpu_milli BIGINT, 
	max_sessions INTEGER, 
	max_pending INTEGER, 
	max_lifetime_s BIGINT, 
	PRIMARY KEY (scope, name, resource_group)
);
INSERT INTO "fgpu_quotas" VALUES('user','*','',4000,NULL,NULL,NULL);
INSERT INTO "fgpu_quotas" VALUES('user','carol','',NULL,3,NULL,NULL);
CREATE TABLE fgpu_sessions (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	user_name TEXT NOT NULL, 
	server_name TEXT NOT NULL, 
	image TEXT NOT NULL, 
	resource_group TEXT NOT NULL, 
	fgpu_milli BIGINT NOT NULL, 
	cpu_milli BIGINT NOT NULL, 
	memory_mib BIGINT NOT NULL, 
	state TEXT NOT NULL, 
	submitted_at_s BIGINT NOT NULL, 
	held BOOLEAN NOT NULL, 
	attempt INTEGER NOT NULL, 
	node_id TEXT, 
	wait_reason TEXT, 
	scheduled_at_s BIGINT, 
	started_at_s BIGINT, 
	ended_at_s BIGINT, 
	end_cause TEXT, 
	message TEXT, 
	launched TEXT, 
	replaces BIGINT
, gpu_memory_mib BIGINT, compute_percent INTEGER, gpu_model TEXT, time_limit_s BIGINT, priority INTEGER DEFAULT '0' NOT NULL, groups TEXT DEFAULT '[]' NOT NULL, promised_at_s BIGINT, ends_at_s BIGINT, ends_cause TEXT, idle_since_s BIGINT, kept_until_s BIGINT, place_of BIGINT, asked_priority INTEGER, queued_at_s BIGINT);
INSERT INTO "fgpu_sessions" VALUES(1,'alice','','python','default',1000,1000,512,'TERMINATED',1795367280,0,1,'local',NULL,1795367280,1795367280,1795367296,'USER',NULL,'{"ip": "127.0.0.1", "port": 44969, "isolation": "interposer"}',NULL,NULL,NULL,NULL,NULL,0,'[]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "fgpu_sessions" VALUES(2,'alice','night','python','default',1500,1000,512,'RUNNING',1795367297,0,1,'local',NULL,1795367297,1795367297,NULL,NULL,NULL,'{"ip": "127.0.0.1", "port": 41919, "isolation": "interposer"}',NULL,NULL,NULL,NULL,NULL,0,'[]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "fgpu_sessions" VALUES(3,'bob','','python','default',1000,1000,512,'PENDING',1795367297,0,0,NULL,'RESOURCES',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,'[]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "fgpu_sessions" VALUES(4,'carol','','python','default',600,1000,512,'PENDING',1795367299,0,0,NULL,'RESOURCES',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,'[]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE fgpu_shares (
	session_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	device_uuid TEXT NOT NULL, 
	fgpu_milli BIGINT NOT NULL, 
	memory_mib BIGINT NOT NULL, 
	compute_percent INTEGER NOT NULL, 
	mode TEXT NOT NULL, 
	PRIMARY KEY (session_id, position), 
	CONSTRAINT fgpu_shares_amounts CHECK (fgpu_milli > 0 AND memory_mib > 0 AND compute_percent >= 0), 
	CONSTRAINT fgpu_shares_session FOREIGN KEY(session_id) REFERENCES fgpu_sessions (id)
);
INSERT INTO "fgpu_shares" VALUES(1,0,'GPU-simulated-local-0',1000,4096,50,'memory+compute');
INSERT INTO "fgpu_shares" VALUES(2,0,'GPU-simulated-local-0',1500,6144,75,'memory+compute');
CREATE TABLE fgpu_usage (
	user_name TEXT NOT NULL, 
	resource_group TEXT NOT NULL, 
	fgpu_milli_s DOUBLE NOT NULL, 
	at_s BIGINT NOT NULL, 
	PRIMARY KEY (user_name, resource_group)
);
INSERT INTO "fgpu_usage" VALUES('alice','default',16000.0,1795367296);
CREATE INDEX fgpu_sessions_live ON fgpu_sessions (id) WHERE state IN ('PENDING', 'SCHEDULED', 'PREPARING', 'PULLING', 'RUNNING', 'TERMINATING');
CREATE UNIQUE INDEX fgpu_sessions_serving ON fgpu_sessions (user_name, server_name) WHERE state IN ('PENDING', 'SCHEDULED', 'PREPARING', 'PULLING', 'RUNNING');
CREATE INDEX fgpu_sessions_ended ON fgpu_sessions (ended_at_s);
CREATE INDEX fgpu_sessions_user_ended ON fgpu_sessions (user_name, ended_at_s);
CREATE INDEX fgpu_sessions_user ON fgpu_sessions (user_name, id);
CREATE INDEX fgpu_sessions_ran ON fgpu_sessions (resource_group, ended_at_s) WHERE started_at_s IS NOT NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('fgpu_events',17);
INSERT INTO "sqlite_sequence" VALUES('fgpu_sessions',4);
INSERT INTO "sqlite_sequence" VALUES('fgpu_audit',2);
COMMIT;
